"""Three models under one memory budget: an elastic pool beside a static split, as bursts alternate between them.

Real engines (the demo model's shape with random weights, bf16) in one process on one core, real memory: with `static`
each model has a third of the budget, all of it resident from the start, as a worker's pool is; with `elastic` the three
share it; and once more with 60 % of it. TTFT is of all requests of a run; resident memory is the kernel's figure for
the KV ranges (/proc/self/smaps), its peak over the run. Ways take turns, medians over rounds; a seed per round. Of the
sizes of bursts, the first fits a model's third (nothing to gain but memory), the second fits the budget, the last one
does not.

Activation: the first token of a prompt by a model that nothing is mapped for, while the others' empty pages hold the
whole budget, beside the same with its pages mapped, and beside loading the model, which is what a machine that keeps
only one of them ready has to do (weights from nowhere: reading a checkpoint comes on top).

`taskset -c 0 python -m benchmarks.engine.elastic --json out/elastic.json`
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.elastic_load import (
    Clock,
    Replica,
    StaticBlocks,
    Workload,
    serve,
)
from benchmarks.measure import latencies_ms, median, medians, table, write_json
from engine.batch import Slice
from engine.config import ModelConfig, load_model_config
from engine.elastic import CpuBacking, ElasticModel, ElasticPool, Reserve
from engine.elastic.resident import resident_bytes
from engine.engine import Engine
from protocol.ids import BlockId, RequestId
from protocol.layout import KvLayout
from protocol.native import shared_cache
from protocol.request import SamplingParams

MODEL = Path(__file__).parents[2] / "models" / "demo"
MIB = 1 << 20
NAMES = ("a", "b", "c")
FRAME_BYTES = 16 << 10  # two of its pieces: small pages suit a small budget
LESS = 0.6  # of the memory
Row = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    config: ModelConfig
    layout: KvLayout
    budget_bytes: int
    workload: Workload

    def load(self, num_blocks: int, memory: memoryview) -> Engine:
        return Engine.load(
            MODEL,
            config=self.config,
            layout=self.layout,
            num_blocks=num_blocks,
            memory=memory,
            load_format="dummy",
            cache_folder=shared_cache(),
        )


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to divide memory: replicas, and how much of their KV is resident."""

    replicas: Sequence[Replica]
    resident: Callable[[], int]


@contextmanager
def static_split(setting: Setting) -> Iterator[Way]:
    """Each model has its part, populated."""
    num_blocks = setting.budget_bytes // len(NAMES) // setting.layout.block_bytes
    nbytes = setting.layout.pool_bytes(num_blocks)
    ranges = [CpuBacking(frame_bytes=4096).reserve(-(-nbytes // 4096) * 4096) for _ in NAMES]
    for each in ranges:
        each.map([0], each.nbytes, ())
    yield Way(
        replicas=[
            Replica(setting.load(num_blocks, each.memory), StaticBlocks(num_blocks))
            for each in ranges
        ],
        resident=lambda: sum(resident_bytes(each.address, each.nbytes) for each in ranges),
    )
    for each in ranges:
        each.close()


@contextmanager
def elastic(setting: Setting, share: float = 1.0) -> Iterator[Way]:
    """All share a part of the budget; a twelfth of it is sure to each."""
    budget = int(setting.budget_bytes * share)
    with ElasticPool(budget, CpuBacking(frame_bytes=FRAME_BYTES)) as pool:
        models = [pool.add_model(name, setting.layout, floor=budget // 12) for name in NAMES]
        yield Way(
            replicas=[Replica(setting.load(m.num_blocks, m.memory), m) for m in models],
            resident=lambda: sum(_resident(model) for model in models),
        )
        pool.validate()


def _resident(model: ElasticModel) -> int:
    return resident_bytes(model.address, model.paging.range_bytes)


WAYS: dict[str, Callable[[Setting], Any]] = {
    "static": static_split,
    "elastic": elastic,
    f"elastic, {LESS:.0%} of the memory": lambda setting: elastic(setting, LESS),
}
EVERY = 100  # rounds of steps between two looks at resident memory, which take milliseconds


def run(way: Way, setting: Setting, seed: int) -> Row:
    arrivals = setting.workload.arrivals(seed, setting.config.vocab_size)
    clock = Clock()
    peak = num_rounds = 0

    def look() -> None:
        nonlocal peak, num_rounds
        num_rounds += 1
        if num_rounds % EVERY == 0:
            with clock.stopped():
                peak = max(peak, way.resident())

    for replica in way.replicas:
        replica.finished.clear()
        replica.largest_batch = 0
    timelines = serve(way.replicas, arrivals, clock, look)
    return {
        **latencies_ms(timelines),
        "largest_batch": float(max(replica.largest_batch for replica in way.replicas)),
        "peak_resident_mib": peak / MIB,
    }


def bursts(setting: Setting, rounds: int) -> dict[str, list[Row]]:
    """Each way's rounds, taken in turns."""
    rows: dict[str, list[Row]] = {name: [] for name in WAYS}
    for seed in range(rounds):
        for name, way in WAYS.items():
            with way(setting) as made:
                rows[name].append(run(made, setting, seed))
    return rows


# -- activation


def activation(setting: Setting, rounds: int, num_tokens: int = 128) -> Row:
    """Medians in milliseconds of CPU time."""
    rows: list[Row] = []
    keep_all = Reserve(low=0, high=1 << 20, idle_s=1e9)
    for _ in range(rounds):
        with ElasticPool(
            setting.budget_bytes, CpuBacking(frame_bytes=FRAME_BYTES), reserve=keep_all
        ) as pool:
            model, other = (pool.add_model(name, setting.layout) for name in NAMES[:2])
            began = time.process_time()
            engine = setting.load(model.num_blocks, model.memory)
            loaded_ms = (time.process_time() - began) * 1e3
            _first_token(
                engine, model, num_tokens
            )  # compiles, allocates what engines allocate once
            _take_all(other)
            cold = _first_token(engine, model, num_tokens)
            warm = _first_token(engine, model, num_tokens)
            rows.append(
                {
                    "cold_allocate_ms": cold[0],
                    "cold_ttft_ms": sum(cold),
                    "warm_allocate_ms": warm[0],
                    "warm_ttft_ms": sum(warm),
                    "load_ms": loaded_ms,
                }
            )
    return medians(rows)


def _take_all(model: ElasticModel) -> None:
    blocks = model.allocate(model.available())
    if blocks is None:
        raise RuntimeError("what was available was not")
    model.free(blocks)


def _first_token(engine: Engine, model: ElasticModel, num_tokens: int) -> tuple[float, float]:
    """Milliseconds of the allocation, and of the computation that follows."""
    began = time.process_time()
    blocks = model.allocate(engine.layout.blocks_for(num_tokens + 1))
    if blocks is None:
        raise RuntimeError("a cold model found no memory")
    allocated = time.process_time()
    engine.execute([_prompt(num_tokens, blocks)])
    ended = time.process_time()
    model.free(blocks)
    return (allocated - began) * 1e3, (ended - allocated) * 1e3


def _prompt(num_tokens: int, blocks: list[BlockId]) -> Slice:
    return Slice(
        request_id=RequestId("activation"),
        token_ids=list(range(16, 16 + num_tokens)),
        start=0,
        end=num_tokens,
        block_table=blocks,
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
        num_prompt_tokens=num_tokens,
        samples=True,
    )


# -- the command


def verdicts(rows: dict[str, list[Row]]) -> Row:
    """Static ÷ elastic of each round's p99 TTFT, medians: the bars are ≥ 2 at equal memory, or ≥ 1 with 60 % of it."""
    static, same, less = rows.values()
    return {
        "p99_equal_memory": _ratio(static, same, "ttft_p99_ms"),
        "p50_equal_memory": _ratio(static, same, "ttft_p50_ms"),
        "p99_less_memory": _ratio(static, less, "ttft_p99_ms"),
        "p50_less_memory": _ratio(static, less, "ttft_p50_ms"),
    }


def _ratio(static: Sequence[Row], other: Sequence[Row], figure: str) -> float:
    return median([a[figure] / b[figure] for a, b in zip(static, other, strict=True)])


def main() -> int:
    arguments = _arguments()
    result: dict[str, Any] = {"benchmark": "elastic", "budget_mib": arguments.budget_mib}
    lines: list[list[Any]] = []
    for size in arguments.bursts:
        rows = bursts(_setting(arguments, size), arguments.rounds)
        figures = {name: medians(each) for name, each in rows.items()}
        lines += [[size, name, *row.values()] for name, row in figures.items()]
        ratios = verdicts(rows)
        lines.append([size, "static ÷ elastic", *_cells(ratios)])
        result[f"bursts of {size}"] = {"rounds": rows, "ratios": ratios}
    headers = ["burst", "way", *next(iter(figures.values()))]
    print(table(headers, lines))
    cold = result["activation"] = activation(_setting(arguments, 0), max(arguments.rounds, 5))
    print(table(list(cold), [list(cold.values())]))
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def _cells(ratios: Row) -> list[str]:
    """Under the figures that they are of, at equal memory and with less."""
    return [
        f"{ratios['p50_equal_memory']:.2f} / {ratios['p50_less_memory']:.2f}",
        f"**{ratios['p99_equal_memory']:.2f} / {ratios['p99_less_memory']:.2f}**",
        "",
        "",
        "",
        "",
    ]


def _setting(arguments: argparse.Namespace, burst_requests: int) -> Setting:
    config = load_model_config(MODEL)
    return Setting(
        config=config,
        layout=config.kv_layout(arguments.block_size, "auto"),
        budget_bytes=arguments.budget_mib * MIB,
        workload=Workload(
            burst_requests=burst_requests,
            prompt_tokens=tuple(arguments.prompt),
            output_tokens=tuple(arguments.output),
        ),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-mib", type=int, default=36)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--bursts", type=int, nargs="+", default=(10, 24, 40), help="requests")
    parser.add_argument("--prompt", type=int, nargs=2, default=(64, 192), help="tokens, from to")
    parser.add_argument("--output", type=int, nargs=2, default=(128, 384), help="tokens, from to")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
