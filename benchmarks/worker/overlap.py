"""Measures the gain of computing while a cached prefix is loaded: `python -m benchmarks.worker.overlap`.

A prefill worker (the product's service and engine) gets one prompt, most of which is in a store. The store is a
separate process; another process receives the handoff in place of a decode worker. Three ways take turns: recompute
everything, load the whole prefix and then compute the rest, and do both at once, layer by layer. **Hidden** is the
share of the load time in which the engine computed. The load time lasts from the request for leases to the last
verified block. The engine's waits for layers do not count as computing.

Over loopback a load is much shorter than computing. So slower wires are simulated too: data read over TCP is delayed
until a wire of `--wire-mb-s` would have delivered it. Everything else is real. Bars: 70 % hidden, first token 80 %
sooner than with recomputing.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine.shapes import DEMO_FOLDER, SMALL, prompt_tokens
from benchmarks.harness.measure import median, table
from benchmarks.worker.overlap_worker import TOKEN, LoadMode, PrefillRun, Worker, sink_process, store_process
from benchmarks.worker.timeline import RecordedTransfer, draw_load
from moonserve.engine.replica import load_replica
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import PrefixSource

WAYS = {"recompute": "never", "whole": "never", "layered": "auto"}
"""Way (recompute; load, then compute; both at once) → value of the worker's --layered-loads."""
HIDDEN_BAR, SOONER_BAR = 0.70, 0.80


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Connection to a store."""

    name: str
    transports: str
    bytes_per_s: float | None = None  # None: unlimited


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the rounds of one wire."""

    wire: Wire
    ttft_s: dict[str, float]
    load_s: dict[str, float]
    hidden: float
    sooner: float  # than with recomputing, as a share of its TTFT
    than_whole: float  # TTFT layered ÷ whole, median of the rounds' ratios
    num_early: int


def wires(rates_mb_s: Sequence[float]) -> list[Wire]:
    slow = [Wire(name=f"tcp at {rate:g} MB/s", transports="tcp", bytes_per_s=rate * 1e6) for rate in rates_mb_s]
    return [Wire(name="shm", transports="shm,tcp"), Wire(name="tcp", transports="tcp"), *slow]


async def measure(options: argparse.Namespace) -> list[Figures]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = DEMO_FOLDER if options.model == "demo" else Path(temporary)
        if options.model == "110M":
            (folder / "config.json").write_text(json.dumps(SMALL))
        config = _config(folder, options)
        prompt = prompt_tokens(7, options.tokens, 1000)
        num_blocks = int(options.tokens * options.cached) // config.block_size
        async with AsyncExitStack() as stack:
            transfer = RecordedTransfer(cluster_token=TOKEN)
            stack.enter_context(transfer)
            replica, segment = await load_replica(config, transfer.allocate, Lifecycle(None))
            stack.enter_context(closing(replica.thread))
            layout = replica.plan.layout
            prompt_blocks = layout.blocks_for(options.tokens)
            sink = await stack.enter_async_context(sink_process(layout.pool_bytes(prompt_blocks), prompt_blocks))
            worker = Worker(replica, segment, transfer, prompt, sink)
            stack.push_async_callback(worker.close)
            nbytes = layout.block_bytes * (prompt_blocks + 64)
            stores = {}
            for transports in ("shm,tcp", "tcp"):
                address = await stack.enter_async_context(store_process(transports, nbytes))
                stores[transports] = await worker.fill(address)
            figures = []
            for wire in wires(options.wire_mb_s):
                source = PrefixSource(store=stores[wire.transports], first_block=0, num_blocks=num_blocks)
                figures.append(await _rounds(worker, wire, source, options))
            return figures


def _config(folder: Path, options: argparse.Namespace) -> PrefillConfig:
    return PrefillConfig(
        instance_id="overlap",
        cluster_token=TOKEN,
        model=str(folder),
        dtype=options.dtype,
        load_format="dummy" if options.model == "110M" else "auto",
        kv_cache_memory=160 << 20 if options.dtype == "bfloat16" else 320 << 20,
        max_num_batched_tokens=512,
    )


async def _rounds(worker: Worker, wire: Wire, source: PrefixSource, options: argparse.Namespace) -> Figures:
    worker.stores.bytes_per_s = wire.bytes_per_s
    runs: dict[str, list[PrefillRun]] = {name: [] for name in WAYS}
    async with AsyncExitStack() as stack:
        ways: dict[str, LoadMode] = {}
        for name, mode in WAYS.items():
            ways[name] = await stack.enter_async_context(worker.load_mode(mode))
        for number in range(options.rounds + options.warm_rounds):
            is_warm = number >= options.warm_rounds  # before, the worker learns the store's speed
            for name, way in ways.items():
                if is_warm or name != "recompute":
                    run = await worker.prefill(way, None if name == "recompute" else source)
                    runs[name] += [run] if is_warm else []
        num_early = ways["layered"].state.counters["early_steps"]
    assert len({run.token_id for each in runs.values() for run in each}) == 1, "tokens differ"
    if options.picture is not None and wire.name == options.picture_of:
        chosen = [(name, _middle(runs[name])) for name in ("whole", "layered")]
        draw_load(
            options.picture,
            f"{source.num_blocks * 32} of {options.tokens} tokens from a store, {wire.name}",
            [(name, run.record) for name, run in chosen],
        )
    return _figures(wire, runs, num_early)


def _middle(runs: Sequence[PrefillRun]) -> PrefillRun:
    return sorted(runs, key=lambda run: run.ttft_s)[len(runs) // 2]


def _figures(wire: Wire, runs: dict[str, list[PrefillRun]], num_early: int) -> Figures:
    def of_pairs(first: str, second: str) -> float:
        pairs = zip(runs[first], runs[second], strict=True)
        return median([one.ttft_s / other.ttft_s for one, other in pairs])

    return Figures(
        wire=wire,
        ttft_s={name: median([run.ttft_s for run in each]) for name, each in runs.items()},
        load_s={name: median([run.record.load_s for run in each]) for name, each in runs.items()},
        hidden=median([run.record.hidden_share for run in runs["layered"]]),
        sooner=1 - of_pairs("layered", "recompute"),
        than_whole=of_pairs("layered", "whole"),
        num_early=num_early,
    )


def report(figures: Sequence[Figures]) -> str:
    """Returns the figures as a Markdown table."""
    headers = (
        "wire",
        "computed again ms",
        "loaded whole ms",
        "layer by layer ms",
        "… of loaded whole",
        "load whole ms",
        "load by layer ms",
        "hidden %",
        "sooner than computed again %",
    )
    rows = [
        [
            each.wire.name,
            *(each.ttft_s[name] * 1e3 for name in WAYS),
            f"{each.than_whole:.3f}",
            *(each.load_s[name] * 1e3 for name in ("whole", "layered")),
            each.hidden * 100,
            each.sooner * 100,
        ]
        for each in figures
    ]
    return table(headers, rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker.overlap")
    parser.add_argument("--model", default="110M", choices=("110M", "demo"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", default=8192, type=int)
    parser.add_argument("--cached", default=0.953, type=float, help="share of the prompt stored")
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--warm-rounds", default=2, type=int)
    parser.add_argument("--wire-mb-s", default=[1000.0, 250.0], type=_rates)
    parser.add_argument("--picture", type=Path, help="SVG file for the timeline")
    parser.add_argument("--picture-of", default="tcp at 250 MB/s", help="wire that it shows")
    figures = asyncio.run(measure(parser.parse_args()))
    print(report(figures))
    met = all(each.hidden >= HIDDEN_BAR and each.sooner >= SOONER_BAR for each in figures)
    print(f"\nbars: {HIDDEN_BAR:.0%} hidden, {SOONER_BAR:.0%} sooner: {'met' if met else 'missed'}")
    return 0 if met else 1


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",") if rate]


if __name__ == "__main__":
    raise SystemExit(main())
