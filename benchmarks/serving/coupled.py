"""`python -m benchmarks.serving.coupled --trace FILE`: a prefill and a decode worker against two that do both, live.

Each side has two workers with one thread and one core each, behind the same gateway, conductor and client. Coupled
workers compute chunks of prompts in decode steps and cache prefixes (`benchmarks.serving.coupled_worker`). Both sides
serve the same requests of the trace at the same times, in turn, at several speeds. The result is goodput: requests per
second that keep a TTFT and a TBT target (TBT of a request: the mean of the longest tenth of its gaps, as in the paper).
IdleLatency are multiples of a single request's times on an idle cluster: 10 for TTFT and 5 for TBT, as in the paper,
and other multiples for TBT. Prints results and writes docs/coupled-live.md; the exit code does not depend on the
results.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.measure import median, random_prompts, table, write_json
from moonserve.deploy.launcher.config import ServeConfig
from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.launcher.process_specs import ProcessKind, ProcessSpec, conductor_spec, member_specs
from moonserve.deploy.launcher.supervisor import Supervisor
from moonserve.models import demo_model_path
from moonserve.traces.client import StreamClient
from moonserve.traces.replay import ReplayConfig, ReplayResult, build_report, send_trace

LENGTHS = 1 / 16
BLOCK_SIZE = 32
TTFT_MULTIPLE = 10.0
TBT_MULTIPLES = (2.0, 3.0, 5.0, 10.0)
PAPER_MULTIPLE = 5.0
IDLE_REQUESTS = 8
IDLE_PROMPT = 768  # about the mean of the scaled trace
SIDES = ("disaggregated", "coupled")
NO_SLO_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are replayed."""

    trace: Path
    limit: int
    outputs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLatency:
    """Seconds of a single request on an idle cluster, on which the targets are based."""

    ttft_s: float
    tbt_s: float


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    load = Load(trace=arguments.trace, limit=arguments.limit, outputs=arguments.scale_outputs)
    speedups = [float(speedup) for speedup in arguments.speedups.split(",")]
    result = asyncio.run(measure(load, speedups, arguments.rounds))
    print(as_text(result))
    write_json(arguments.output, result)
    arguments.page.write_text(as_page(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="the conversation trace")
    parser.add_argument("--limit", type=int, default=200, help="first requests of the trace")
    parser.add_argument("--scale-outputs", type=float, default=0.25, help="factor on answers")
    parser.add_argument("--speedups", default="1,2,3,4", help="factors on the clock, commas")
    parser.add_argument("--rounds", type=int, default=1, help="of each speed and side, in turn")
    parser.add_argument("--output", type=Path, default=Path("out/coupled_live.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/coupled-live.md"))
    return parser


async def measure(load: Load, speedups: Sequence[float], rounds: int) -> dict[str, Any]:
    """Replays in turn on both sides, each time on a fresh cluster, so that nothing is cached from an earlier replay."""
    alone = [await _measure_idle(side) for side in SIDES]
    targets = IdleLatency(ttft_s=median([each.ttft_s for each in alone]), tbt_s=median([each.tbt_s for each in alone]))
    rows = []
    for speedup in speedups:
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                async with cluster_of(side) as url:
                    await _warm_up(url)
                    replayed = await send_trace(_replay_config(url, load, speedup))
                rows.append({"speedup": speedup, "side": side, **figures(replayed, targets)})
    return {
        "load": {"trace": load.trace.name, "requests": load.limit, "outputs": load.outputs},
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[0], 1),
        },
        "targets": {"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s},
        "alone": {side: vars_of(each) for side, each in zip(SIDES, alone, strict=True)},
        "rows": rows,
    }


def vars_of(targets: IdleLatency) -> dict[str, float]:
    return {"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s}


async def _measure_idle(side: str) -> IdleLatency:
    """Measures one request at a time on an idle cluster."""
    async with cluster_of(side) as url, StreamClient(url) as client:
        facts = await client.model(None)
        assert facts.vocab_size is not None
        prompts = random_prompts(IDLE_REQUESTS + 2, IDLE_PROMPT, facts.vocab_size, side)
        timelines = []
        for prompt in prompts:
            outcome = await client.complete(facts.name, prompt, max_tokens=48)
            if outcome.timeline is None or outcome.error is not None:
                raise RuntimeError(f"a request alone failed: {outcome.error}")
            timelines.append(outcome.timeline)
    steady = timelines[2:]
    return IdleLatency(
        ttft_s=median([timeline.ttft_s for timeline in steady]),
        tbt_s=median([gap for timeline in steady for gap in timeline.gaps_s[1:]]),
    )


async def _warm_up(url: str) -> None:
    async with StreamClient(url) as client:
        facts = await client.model(None)
        for token in range(20, 24):
            prompts = [[token + 4 * n] * 300 for n in range(2)]
            await asyncio.gather(*(client.complete(facts.name, p, max_tokens=16) for p in prompts))


def _replay_config(url: str, load: Load, speedup: float) -> ReplayConfig:
    return ReplayConfig(
        trace=str(load.trace),
        url=url,
        limit=load.limit,
        scale_lengths=LENGTHS,
        scale_outputs=load.outputs,
        speedup=speedup,
    )


def figures(replayed: ReplayResult, targets: IdleLatency) -> dict[str, Any]:
    """Returns the report for the paper's targets, and goodput for other TBT targets."""
    reports = {
        multiple: build_report(
            replayed.sent,
            duration_s=replayed.duration_s,
            ttft_slo_s=TTFT_MULTIPLE * targets.ttft_s,
            tbt_slo_s=multiple * targets.tbt_s,
        )
        for multiple in TBT_MULTIPLES
    }
    return {
        **reports[PAPER_MULTIPLE],
        "goodput_by_multiple": {f"{multiple:g}": report["request_goodput"] for multiple, report in reports.items()},
        "effective_by_multiple": {
            f"{multiple:g}": report["effective_fraction"] for multiple, report in reports.items()
        },
    }


# -- clusters


@contextlib.asynccontextmanager
async def cluster_of(side: str) -> AsyncIterator[str]:
    """Runs a cluster of this side, each worker pinned to its own core. Yields its URL."""
    config = ServeConfig(
        port=free_port(),
        prefill_workers=1,
        decode_workers=1 if side == "disaggregated" else 2,
        store_nodes=1 if side == "disaggregated" else 0,
        num_threads=1,
        block_size=BLOCK_SIZE,
        ttft_slo=NO_SLO_S,
        tbt_slo=NO_SLO_S,
    )
    with tempfile.TemporaryDirectory() as log_dir:
        supervisor = Supervisor(Path(log_dir), _environment(), lambda: None)
        try:
            (conductor,) = await supervisor.start([conductor_spec(config)])
            specs = member_specs(config, str(demo_model_path()), conductor.facts["rpc"])
            await supervisor.start(specs if side == "disaggregated" else coupled_specs(specs))
            _pin([c.pid for c in supervisor.children if c.spec.kind in (ProcessKind.PREFILL, ProcessKind.DECODE)])
            await _until_ready(f"http://127.0.0.1:{config.port}")
            yield f"http://127.0.0.1:{config.port}"
        finally:
            await supervisor.stop()


def coupled_specs(specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Replaces decode workers by coupled workers and removes prefill workers."""
    kept = [spec for spec in specs if spec.kind is not ProcessKind.PREFILL]
    return [
        replace(spec, argv=("-m", "benchmarks.serving.coupled_worker")) if spec.kind is ProcessKind.DECODE else spec
        for spec in kept
    ]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "MOONSERVE_CLUSTER_TOKEN": os.urandom(16).hex(),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *(p for p in sys.path if p)]),
    }


def _pin(pids: Sequence[int | None]) -> None:
    """Pins the threads of each worker to one core, in turn."""
    cores = sorted(os.sched_getaffinity(0))
    for number, pid in enumerate(pids):
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, [cores[number % len(cores)]])


async def _until_ready(url: str) -> None:
    """Waits until the conductor knows all workers."""
    async with StreamClient(url) as client:
        async with asyncio.timeout(60.0):
            while not await client.is_ready():  # noqa: ASYNC110 - another process reports it
                await asyncio.sleep(0.05)


# -- the table


def as_text(result: dict[str, Any]) -> str:
    columns = ["p50_ttft_ms", "p90_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p90_tbt_ms", "hit_ratio"]
    rows = [
        [
            f"{row['speedup']:g}x",
            row["side"],
            *(f"{row['goodput_by_multiple'][f'{m:g}']:.2f}" for m in TBT_MULTIPLES),
            f"{row['request_throughput']:.2f}",
            *(f"{row[name]:.3g}" for name in columns),
        ]
        for row in result["rows"]
    ]
    targets = result["targets"]
    headers = [
        "speed",
        "side",
        *(f"goodput/s at {multiple:g}x TBT" for multiple in TBT_MULTIPLES),
        "requests/s",
        *columns,
    ]
    return "\n".join(
        (
            f"One request alone: TTFT {targets['ttft_s'] * 1e3:.1f} ms, step {targets['tbt_s'] * 1e3:.2f} ms. "
            f"Targets: TTFT {TTFT_MULTIPLE:g} times that, TBT as the columns say (paper: {PAPER_MULTIPLE:g}).",
            "",
            table(headers, rows),
        )
    )


def as_page(result: dict[str, Any]) -> str:
    """Returns the text of docs/coupled-live.md."""
    load, machine = result["load"], result["machine"]
    return "\n".join(
        (
            "# Apart or together, live",
            "",
            "A prefill and a decode worker against two workers that do both in one batch, behind the same gateway, "
            "conductor",
            "and client, each worker with one thread on a core of its own: "
            "`python -m benchmarks.serving.coupled --trace FILE`.",
            "",
            f"The first {load['requests']} requests of {load['trace']}, prompts at 1/{1 / LENGTHS:g} and answers at "
            f"1/{1 / load['outputs']:g} of their lengths; the demo model, {machine['cores']} cores, load "
            f"{machine['load']:g} at the end.",
            "",
            as_text(result),
            "",
            "Goodput counts requests per second that keep both targets; TBT of a request is the mean of the longest "
            "tenth of its",
            "gaps. Gateway, conductor, store and client have no core of their own here.",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
