"""`python -m benchmarks.conductor.conditional_disaggregation --trace FILE [--quick]`: simulates decode machines that
prefill if that is sooner.

Simulates the conversation trace on 8 prefill and 8 decode machines, at its own speed and at twice its speed, with both
placement policies, each without and with conditional disaggregation. On the first requests it also varies the share of
the TBT objective that a step with chunks may take. No request is rejected. The printed tables are the ones of
docs/conditional-disaggregation.md. Simulations are kept below out/, so that an interrupted run continues.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conductor.simulated_runs import argument_parser, run_simulations
from benchmarks.harness.measure import table, write_json
from moonserve.protocol.latency import mean, percentile
from moonserve.protocol.step_time import CHUNK_SHARE
from moonserve.traces.experiments.parallel_runs import ClusterRun, TraceFile
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.results import SimulationResult
from moonserve.traces.simulator.spec import ClusterSpec

SPEEDUPS = (1.0, 2.0)
POLICIES = ("global-cache-aware", "moonserve")
SHARES = (0.95, 0.65, CHUNK_SHARE, 0.4)  # of the TBT objective; decode steps alone may take 0.95
SOME = 2_000  # requests that are simulated for each share
HEADERS = (
    "policy", "speed", "decode machines prefill", "TTFT mean, s", "p50", "p90", "TBT p90, ms", "effective, %",
    "prefilled there",
)  # fmt: skip


def run_of(policy: str, speedup: float, share: float | None, num_requests: int | None = None) -> ClusterRun:
    """Returns a simulation run. `share`: None = decode machines do not prefill."""
    spec = ClusterSpec(
        model=LLAMA3_70B_8XA800,
        num_prefill=8,
        num_decode=8,
        policy=policy,
        admission="none",
        conditional=share is not None,
        chunk_share=CHUNK_SHARE if share is None else share,
    )
    return ClusterRun(spec=spec, speedup=speedup, num_requests=num_requests)


def main_runs(limit: int | None) -> list[ClusterRun]:
    return [
        run_of(policy, speedup, share, limit)
        for policy in POLICIES
        for speedup in SPEEDUPS
        for share in (None, CHUNK_SHARE)
    ]


def share_runs() -> list[ClusterRun]:
    return [run_of(POLICIES[0], speedup, share, SOME) for speedup in SPEEDUPS for share in (None, *SHARES)]


def figures(result: SimulationResult) -> dict[str, float]:
    """Returns figures in seconds; `effective`: share of requests with TTFT and TBT within 30 s and 0.1 s."""
    ttfts = sorted(each.ttft_s for each in result.outcomes if each.ttft_s is not None)
    tbts = sorted(each.tbt_s for each in result.outcomes if each.tbt_s is not None)
    effective = (
        each.is_effective(ttft_slo_s=result.ttft_slo_s, tbt_slo_s=result.tbt_slo_s) for each in result.outcomes
    )
    num_there = sum(each.prefill == each.decode for each in result.outcomes)
    return {
        "mean_ttft_s": mean(ttfts),
        "p50_ttft_s": percentile(ttfts, 50),
        "p90_ttft_s": percentile(ttfts, 90),
        "p90_tbt_s": percentile(tbts, 90),
        "effective": sum(effective) / len(result.outcomes),
        "undivided": num_there / len(result.outcomes),
    }


def row_of(run: ClusterRun, found: dict[str, float]) -> dict[str, Any]:
    assert isinstance(run.spec, ClusterSpec)
    return {
        "policy": run.spec.policy,
        "speedup": run.speedup,
        "share": run.spec.chunk_share if run.spec.conditional else None,
        **found,
    }


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    return table(HEADERS, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    share = row["share"]
    return [
        row["policy"],
        f"{row['speedup']:g}×",
        "no" if share is None else f"up to {share:g} of TBT",
        *(f"{row[name]:.2f}" for name in ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s")),
        f"{row['p90_tbt_s'] * 1e3:.1f}",
        f"{row['effective'] * 100:.2f}",
        f"{row['undivided']:.1%}",
    ]


def measure(runs: Sequence[ClusterRun], trace: TraceFile, folder: Path, num_processes: int) -> list[dict[str, Any]]:
    results = run_simulations(runs, trace, folder, num_processes)
    return [row_of(run, figures(result)) for run, result in zip(runs, results, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = argument_parser(__doc__, "out/conditional/conditional.json").parse_args(argv)
    trace, folder = TraceFile(path=arguments.trace), arguments.output.parent
    runs = {"shares": share_runs(), "rows": main_runs(SOME if arguments.quick else None)}
    result = {name: measure(each, trace, folder, arguments.processes) for name, each in runs.items()}
    write_json(arguments.output, result)
    print(*(as_table(rows) for rows in result.values()), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
