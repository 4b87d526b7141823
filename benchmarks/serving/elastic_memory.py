"""Compares fixed and elastic KV memory of three models' clusters: `python -m benchmarks.serving.elastic_memory`.

Each model has real processes: a conductor, a gateway, a prefill worker and a decode worker, one compute thread each
(the demo model, bf16). Bursts of requests go to the models in turn. Answers are long, so that requests wait for KV
memory. Three ways to divide the memory take turns, each with fresh clusters:

- fixed: every model has a third; its prefill worker has a sixth of that and its decode worker the rest;
- elastic: all six workers share the budget through one ledger, and each may use all of it;
- elastic, 60 % of the memory.

Clients measure TTFT over all requests of a run. Memory is the size that the kernel reports for the files of all six
workers' pools, sampled every 20 ms; the peak of a run counts. Bursts are as far apart as two cores need for one burst,
so that requests wait for memory and not for processors. Before a run, each model answers some requests of the load, so
that decode workers have seen the lengths of answers. Figures are medians over rounds, with one seed per round.
`--resume` measures only the rounds that are missing in the JSON file.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import (
    interleaved,
    latencies_ms,
    median,
    medians,
    random_prompts,
    report_progress,
    table,
    write_json,
)
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.launcher.process_specs import ProcessKind, ProcessSpec, conductor_spec, member_specs
from moonserve.deploy.launcher.supervisor import Supervisor
from moonserve.engine.model.config import load_model_config
from moonserve.models import demo_model_path
from moonserve.protocol.latency import Timeline
from moonserve.traces.client import Outcome, StreamClient

MIB = 1 << 20
NUM_MODELS = 3
PREFILL_SHARE = 6  # a prefill worker has 1/6 of a fixed third
LESS = 0.6  # of the memory budget
BLOCK_SIZE = 32
WARM_UP = 12  # requests per model: a decode worker predicts lengths once ten have ended
NO_SLO_S = 600.0
_POOL = re.compile(r"/memfd:moonserve(:kv)? \(deleted\)")  # elastic pools have the suffix
SAMPLE_S = 0.02  # between two samples of resident memory
DIVISIONS = ("fixed", "elastic", f"elastic, {LESS:.0%}")
Row = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Bursts of requests, one model after the other, with uniformly distributed lengths."""

    burst: int  # number of requests
    num_bursts: int
    period_s: float
    prompt: tuple[int, int]  # tokens: least, most
    output: tuple[int, int]

    def burst_of(self, seed: str, vocab_size: int) -> list[tuple[list[int], int]]:
        """Returns the prompts of a burst and the lengths of their answers."""
        dice = random.Random(seed)
        sizes = [dice.randint(*self.prompt) for _ in range(self.burst)]
        prompts = [random_prompts(1, size, vocab_size, f"{seed}-{n}")[0] for n, size in enumerate(sizes)]
        return [(prompt, dice.randint(*self.output)) for prompt in prompts]


# -- clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A running cluster: its URL and its workers."""

    url: str
    workers: Sequence[int]  # process ids


def flags_of(way: str, budget: int, ledger: Path) -> dict[str, Any]:
    """Returns the memory options of all workers; `fixed_parts` divides a fixed third among a model's workers."""
    if way == DIVISIONS[0]:
        return {"kv_cache_memory": budget // NUM_MODELS}
    share = budget if way == DIVISIONS[1] else int(budget * LESS)
    return {
        "kv_cache_memory": share,
        "kv_memory_budget": share,
        "kv_memory_floor": share // 24,
        "kv_memory_ledger": str(ledger),
    }


def fixed_parts(specs: Sequence[ProcessSpec], third: int) -> list[ProcessSpec]:
    """Sets each worker's share of its model's third of the memory."""
    parts = {
        ProcessKind.PREFILL: third // PREFILL_SHARE,
        ProcessKind.DECODE: third - third // PREFILL_SHARE,
    }
    return [
        replace(spec, flags=_with(spec.flags, "--kv-cache-memory", str(parts[spec.kind])))
        if spec.kind in parts
        else spec
        for spec in specs
    ]


def _with(flags: Sequence[str], name: str, value: str) -> tuple[str, ...]:
    place = flags.index(name) + 1
    return (*flags[:place], value, *flags[place + 1 :])


@contextlib.asynccontextmanager
async def models_of(way: str, budget: int) -> AsyncIterator[list[Model]]:
    """Starts all clusters and waits until they are ready."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = [_cluster(way, budget, folder, number) for number in range(NUM_MODELS)]
        yield await asyncio.gather(*map(stack.enter_async_context, clusters))


@contextlib.asynccontextmanager
async def _cluster(way: str, budget: int, folder: Path, number: int) -> AsyncIterator[Model]:
    config = ServeConfig(
        port=free_port(),
        store_nodes=0,
        num_threads=1,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        admission="none",
        ttft_slo=NO_SLO_S,
        tbt_slo=NO_SLO_S,
        **flags_of(way, budget, folder / "ledger"),
    )
    logs = folder / f"model-{number}"
    logs.mkdir()
    supervisor = Supervisor(logs, _environment(), lambda: None)
    try:
        (conductor,) = await supervisor.start([conductor_spec(config)])
        # The ledger identifies workers by name, so names must be unique.
        specs = [
            replace(spec, flags=_with(spec.flags, "--instance-id", f"{spec.instance_id}-of-{number}"))
            for spec in member_specs(config, str(demo_model_path()), conductor.facts["rpc"])
        ]
        await supervisor.start(fixed_parts(specs, budget // NUM_MODELS) if way == DIVISIONS[0] else specs)
        url = f"http://127.0.0.1:{config.port}"
        await _until_ready(url)
        workers = [c for c in supervisor.children if c.spec.kind in (ProcessKind.PREFILL, ProcessKind.DECODE)]
        pids = [child.pid for child in workers if child.pid is not None]
        assert len(pids) == len(workers), "they are ready"
        yield Model(url=url, workers=pids)
    finally:
        await supervisor.stop()


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "MOONSERVE_CLUSTER_TOKEN": os.urandom(16).hex(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *(p for p in sys.path if p)]),
    }


async def _until_ready(url: str) -> None:
    """Waits until the conductor knows all workers."""
    async with StreamClient(url) as client, asyncio.timeout(60.0):
        while not await client.is_ready():  # noqa: ASYNC110 - polls another process
            await asyncio.sleep(0.05)


def pools_of(pids: Sequence[int]) -> list[Path]:
    """Returns one /proc link to the file of each of the workers' pools."""
    found: dict[int, Path] = {}
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if _POOL.fullmatch(os.readlink(link)):
                found.setdefault(link.stat().st_ino, link)
    return list(found.values())


def resident_bytes(pool: Path) -> int:
    """Returns the memory that a pool uses on the machine. Takes microseconds, so a sample covers one moment."""
    return pool.stat().st_blocks * 512


# -- one run


async def run(way: str, budget: int, load: Load, seed: int) -> Row:
    """Runs one way with one seed and returns its figures. Raises RuntimeError if a request fails."""
    vocab_size = load_model_config(demo_model_path()).vocab_size
    async with models_of(way, budget) as models:
        await asyncio.gather(
            *(
                _burst(model, replace(load, burst=WARM_UP).burst_of(f"warm {n}", vocab_size))
                for n, model in enumerate(models)
            )
        )
        looking = asyncio.create_task(_peak(models, done := asyncio.Event()))
        begin = asyncio.get_running_loop().time()
        bursts = []
        for number in range(load.num_bursts):
            await asyncio.sleep(max(0.0, begin + number * load.period_s - _now()))
            requests = load.burst_of(f"{seed} {number}", vocab_size)
            bursts.append(asyncio.create_task(_burst(models[number % NUM_MODELS], requests)))
        timelines = [timeline for burst in await asyncio.gather(*bursts) for timeline in burst]
        done.set()
        return {**latencies_ms(timelines), "peak_resident_mib": await looking / MIB}


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _burst(model: Model, requests: Sequence[tuple[list[int], int]]) -> list[Timeline]:
    """Sends all requests at once and waits for their answers."""
    async with StreamClient(model.url) as client:
        name = (await client.model(None)).name
        outcomes = await asyncio.gather(
            *(client.complete(name, prompt, max_tokens=count) for prompt, count in requests)
        )
    return [_timeline(outcome) for outcome in outcomes]


def _timeline(outcome: Outcome) -> Timeline:
    if outcome.timeline is None or outcome.error is not None:
        raise RuntimeError(f"a request failed: {outcome.status} {outcome.error}")
    return outcome.timeline


async def _peak(models: Sequence[Model], done: asyncio.Event) -> int:
    """Samples the resident bytes of all pools until `done`; returns the peak."""
    pools = pools_of([pid for model in models for pid in model.workers])
    peak = 0
    while not done.is_set():
        peak = max(peak, sum(map(resident_bytes, pools)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), SAMPLE_S)
    return peak


# -- the command


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(
        burst=arguments.burst,
        num_bursts=arguments.bursts,
        period_s=arguments.period,
        prompt=tuple(arguments.prompt),
        output=tuple(arguments.output),
    )
    ways = DIVISIONS[: arguments.ways]
    of = {"budget_mib": arguments.budget_mib, **asdict(load)}
    rows = _rows_before(arguments.json if arguments.resume else None, ways, of)
    result: dict[str, Any] = {"of": of, "rows": rows}
    for way, _ in interleaved(ways, [load], arguments.rounds, first=len(rows[ways[0]])):
        row = asyncio.run(run(way, arguments.budget_mib * MIB, load, len(rows[way])))
        report_progress(f"{way}: { ({name: round(value, 1) for name, value in row.items()}) }")
        rows[way].append(row)
        if arguments.json is not None and len({len(own) for own in rows.values()}) == 1:
            write_json(arguments.json, result)  # an interrupted run keeps its complete rounds
    return {**result, "ratios": {way: _ratios(rows, way) for way in ways[1:]}}


def _rows_before(file: Path | None, ways: Sequence[str], of: dict[str, Any]) -> dict[str, list[Row]]:
    """Returns the rounds that are already in `file`. Raises SystemExit if its options or ways differ."""
    if file is None or not file.exists():
        return {way: [] for way in ways}
    result = json.loads(file.read_text())
    if result["of"] != json.loads(json.dumps(of)) or list(result["rows"]) != list(ways):
        raise SystemExit(f"{file} was measured with other options: name another file")
    rows: dict[str, list[Row]] = result["rows"]
    return rows


def _ratios(rows: dict[str, list[Row]], way: str) -> Row:
    """Returns medians of the rounds' ratios fixed ÷ this way. Bars: p99 ratio 2 at equal memory, or 1 with 60 %."""
    pairs = list(zip(rows[DIVISIONS[0]], rows[way], strict=True))
    return {
        name: median([fixed[name] / own[name] for fixed, own in pairs])
        for name in ("ttft_p50_ms", "ttft_p99_ms", "peak_resident_mib")
    }


def as_text(result: dict[str, Any]) -> str:
    figures = {way: medians(rows) for way, rows in result["rows"].items()}
    lines: list[list[Any]] = [[way, *row.values()] for way, row in figures.items()]
    ratios = [[f"fixed ÷ {way}", *(f"{value:.2f}" for value in own.values())] for way, own in result["ratios"].items()]
    return "\n\n".join(
        (
            table(["way", *next(iter(figures.values()))], lines),
            table(["ratio", *next(iter(result["ratios"].values()))], ratios),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.elastic_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-mib", type=int, default=108)
    parser.add_argument("--burst", type=int, default=16, help="requests")
    parser.add_argument("--bursts", type=int, default=3, help="in all, one model after the other")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between bursts")
    parser.add_argument("--prompt", type=int, nargs=2, default=(400, 600), help="tokens, from to")
    parser.add_argument("--output", type=int, nargs=2, default=(800, 1200), help="tokens, from to")
    parser.add_argument("--ways", type=int, default=3, choices=(2, 3), help="of the three, so many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="rounds in the JSON file count")
    arguments = parser.parse_args()
    result = measure(arguments)
    print(as_text(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
