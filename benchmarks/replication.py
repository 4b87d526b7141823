"""`python -m benchmarks.replication --trace FILE [--limit N] [--only NAME …]`: stores copy from each other, or not.

Three settings, simulated, each under three placement policies without and with replication by the conductor: the
conversation trace on 8 prefill and 8 decode machines, at its own speed and at twice that; agents with long system
prompts of unequal popularity (synthetic) on the same machines; and four very long system prompts on 16 prefill
machines (synthetic), so that there are always holders with queues and machines without the prefix. Nobody is rejected.
Whatever comes out is printed and becomes docs/replication.md's table; simulations are kept beside the output, so that a
run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.measure import table, write_json
from benchmarks.simulations import simulated
from conductor.replication.planner import ReplicationTerms
from protocol.timeline import mean, percentile
from traces.simulator.many import Run, TraceFile
from traces.simulator.profiles import LLAMA3_70B_8XA800
from traces.simulator.results import SimulationResult
from traces.simulator.spec import ClusterSpec
from traces.synthesis.arrivals import ArrivalSpec
from traces.synthesis.draws import Constant, LogNormal
from traces.synthesis.presets import PRESETS
from traces.synthesis.threads import requests_of
from traces.synthesis.workload import WorkloadSpec
from traces.synthesis.writing import bounded, write_trace

POLICIES = ("global-cache-aware", "moonserve", "local-cache-aware")
SEED = 0
# As the published tool-agent trace, but at twice its rate: at its own, hardly anybody waits on eight machines.
AGENTS = replace(PRESETS["tool-agent"], arrivals=ArrivalSpec(rate=13.0))
# A prompt of 33,000 tokens takes 4.6 s to compute and 0.1 s to read; what follows on it takes a quarter of a second.
FEW_LONG = replace(
    PRESETS["tool-agent"],
    arrivals=ArrivalSpec(rate=20.0),
    system_prompts=4,
    system_zipf=1.0,
    system_tokens=Constant(32_768),
    input_tokens=LogNormal(2_000, 0.8),
    session_share=0.0,
)
NUM_SYNTHETIC = 2_000  # requests
HEADERS = (
    "trace", "policy", "replication", "TTFT mean, s", "p50", "p90", "p99", "tokens hit, %", "moved, TB", "copied, TB",
    "copies", "failed", "blocks made", "dropped",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A trace and the machines that serve it."""

    name: str
    workload: WorkloadSpec | None = None  # None: the given trace
    num_prefill: int = 8
    speedup: float = 1.0

    def trace(self, given: Path, folder: Path, limit: int | None) -> TraceFile:
        """What is simulated; a synthetic one is written first."""
        if self.workload is None:
            return TraceFile(path=given, limit=limit)
        path = folder / f"{self.name}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        number = min(limit or NUM_SYNTHETIC, NUM_SYNTHETIC)
        write_trace(path, bounded(requests_of(self.workload, Random(SEED)), number, None))
        return TraceFile(path=path)

    def runs(self) -> list[Run]:
        spec = ClusterSpec(
            model=LLAMA3_70B_8XA800, num_prefill=self.num_prefill, num_decode=8, admission="none"
        )
        return [
            Run(spec=replace(spec, policy=policy, replication=terms), speedup=self.speedup)
            for policy in POLICIES
            for terms in (None, ReplicationTerms())
        ]


SETTINGS = (
    Setting(name="agents", workload=AGENTS),
    Setting(name="few-long", workload=FEW_LONG, num_prefill=16),
    Setting(name="conversation"),
    Setting(name="conversation-2x", speedup=2.0),
)


def figures(result: SimulationResult) -> dict[str, float]:
    """Seconds, bytes, shares of prompt tokens; of copies nothing where none could be made."""
    ttfts = sorted(each.ttft_s for each in result.outcomes if each.ttft_s is not None)
    counters = result.counters
    return {
        "mean_ttft_s": mean(ttfts),
        **{f"p{percent}_ttft_s": percentile(ttfts, percent) for percent in (50, 90, 99)},
        "hit": sum(each.cached_tokens for each in result.outcomes)
        / sum(each.input_length for each in result.outcomes),
        "bytes_moved": counters["bytes_moved"],
        **{name: counters.get(name, 0.0) for name in ("bytes_copied", "copies", "copies_failed")},
        **{name: counters.get(name, 0.0) for name in ("replicas_made", "replicas_dropped")},
    }


def row_of(setting: Setting, run: Run, found: dict[str, float]) -> dict[str, Any]:
    assert isinstance(run.spec, ClusterSpec)
    is_on = run.spec.replication is not None
    return {"trace": setting.name, "policy": run.spec.policy, "replication": is_on, **found}


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    return table(HEADERS, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("copies", "copies_failed", "replicas_made", "replicas_dropped")
    return [
        row["trace"],
        row["policy"],
        "on" if row["replication"] else "off",
        *(f"{row[f'{name}_ttft_s']:.3f}" for name in ("mean", "p50", "p90", "p99")),
        f"{row['hit']:.2%}".rstrip("%"),
        f"{row['bytes_moved'] / 1e12:.2f}",
        *([f"{row['bytes_copied'] / 1e12:.2f}"] if row["replication"] else ["–"]),
        *(f"{row[name]:.0f}" if row["replication"] else "–" for name in names),
    ]


def measure(setting: Setting, trace: TraceFile, folder: Path, num_processes: int) -> list[Any]:
    runs = setting.runs()
    results = simulated(runs, trace, folder, num_processes)
    return [row_of(setting, run, figures(each)) for run, each in zip(runs, results, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    folder = arguments.output.parent
    rows: list[Any] = []
    for setting in _chosen(arguments.only):
        trace = setting.trace(arguments.trace, folder, arguments.limit)
        rows += measure(setting, trace, folder, arguments.processes)
    write_json(arguments.output, {"rows": rows})
    print(as_table(rows))
    return 0


def _chosen(names: Iterable[str]) -> list[Setting]:
    wanted = set(names)
    return [each for each in SETTINGS if not wanted or each.name in wanted]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="the conversation trace")
    parser.add_argument("--limit", type=int, help="the first requests only")
    names = tuple(each.name for each in SETTINGS)
    parser.add_argument("--only", nargs="*", default=(), choices=names, help="settings; all")
    parser.add_argument("--processes", type=int, default=1, help="simulations at once")
    parser.add_argument("--output", type=Path, default=Path("out/replication/replication.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
