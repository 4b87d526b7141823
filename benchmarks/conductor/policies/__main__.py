"""`python -m benchmarks.conductor.policies --trace FILE [--quick]`: simulates the policy moonserve against
Algorithm 1.

Claim: with the same machines and arrivals, the mean TTFT is at least 15 % lower at twice the trace's speed, no figure
of any row is more than 2 % worse, under overload at least 10 % more requests keep their objectives, and at least 92 %
of the number that no policy can exceed (`bounds`). Algorithm 1 runs with several balancing
thresholds; each row shows the one with the best mean TTFT. One load also measures `moonserve` without each of its
terms. Writes JSON below out/ and, without --quick, docs/policies.md. Finished simulations are kept below out/, so that
an interrupted run continues.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conductor.policies.ablations import ABLATIONS, Ablation
from benchmarks.conductor.policies.bounds import lowest_mean_ttft_s, most_in_time
from benchmarks.conductor.policies.report import as_page
from benchmarks.conductor.simulated_runs import PUBLISHED, Traces, argument_parser, run_simulations
from benchmarks.harness.measure import write_json
from moonserve.conductor.placement.policies.baselines import DEFAULT_BALANCING_THRESHOLD
from moonserve.protocol.latency import mean, percentile
from moonserve.traces.experiments.parallel_runs import ClusterRun
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.results import End, SimulationResult
from moonserve.traces.simulator.spec import ClusterSpec

OURS, THEIRS = "moonserve", "global-cache-aware"
# One row tries all thresholds: 1 and 1.25 differ by less than 1 %, higher ones are worse. Other rows use only 1.25.
THRESHOLDS = (1.0, DEFAULT_BALANCING_THRESHOLD, 2.0)
TBT_SLOS_S = (0.1, 0.2)
QUICK_REQUESTS = 1_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A row of the table: arrivals and machines."""

    trace: str  # name; `Traces` has the files
    speedup: float
    num_prefill: int = 8
    num_decode: int = 8
    admission: str = "none"  # or predicted
    thresholds: tuple[float, ...] = (DEFAULT_BALANCING_THRESHOLD,)  # of Algorithm 1
    num_requests: int | None = None  # None = the whole trace

    def run(self, policy: str, threshold: float, limit: int | None) -> ClusterRun:
        spec = ClusterSpec(
            model=LLAMA3_70B_8XA800,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            policy=policy,
            balancing_threshold=threshold,
            admission=self.admission,
        )
        return ClusterRun(spec=spec, speedup=self.speedup, num_requests=limit or self.num_requests)

    def runs(self, limit: int | None) -> list[ClusterRun]:
        """Returns the run of moonserve, then of Algorithm 1 with each threshold."""
        return [
            self.run(OURS, DEFAULT_BALANCING_THRESHOLD, limit),
            *(self.run(THEIRS, each, limit) for each in self.thresholds),
        ]


HALF, PART = 6_000, 2_500  # numbers of requests for rows in which the whole trace adds nothing to the claim
SCENARIOS = (
    Scenario(trace=PUBLISHED, speedup=1.0),
    Scenario(trace=PUBLISHED, speedup=1.5, num_requests=HALF),
    Scenario(trace=PUBLISHED, speedup=2.0, thresholds=THRESHOLDS),
    Scenario(trace=PUBLISHED, speedup=3.0, num_requests=HALF),
    Scenario(trace=PUBLISHED, speedup=3.0, admission="predicted"),
    Scenario(trace=PUBLISHED, speedup=6.0, admission="predicted", num_requests=HALF),
    Scenario(trace=PUBLISHED, speedup=1.5, num_prefill=6, num_decode=10, num_requests=PART),
    Scenario(trace=PUBLISHED, speedup=1.25, num_prefill=5, num_decode=11, num_requests=PART),
    Scenario(trace="conversation seed 11", speedup=2.2, num_requests=PART),
    Scenario(trace="conversation seed 12", speedup=2.2, num_requests=PART),
    Scenario(trace="tool-agent seed 11", speedup=2.6, num_requests=PART),
)
ABLATED = Scenario(trace="conversation seed 11", speedup=2.2, num_requests=PART)


def figures(result: SimulationResult) -> dict[str, float]:
    """Returns TTFT in seconds over requests with a first token; numbers of requests in time, by TBT objective; more."""
    ttfts = sorted(each.ttft_s for each in result.outcomes if each.ttft_s is not None)
    inputs = sum(each.input_length for each in result.outcomes if each.end is End.COMPLETED)
    good = {
        f"effective_{tbt_slo_s:g}": float(
            sum(each.is_effective(ttft_slo_s=result.ttft_slo_s, tbt_slo_s=tbt_slo_s) for each in result.outcomes)
        )
        for tbt_slo_s in TBT_SLOS_S
    }
    return {
        "mean_ttft_s": mean(ttfts),
        **{f"p{percent}_ttft_s": percentile(ttfts, percent) for percent in (50, 90, 99)},
        **good,
        "requests": float(len(result.outcomes)),
        "rejected": float(sum(each.end is End.REJECTED for each in result.outcomes)),
        "hit_ratio": sum(each.cached_tokens for each in result.outcomes) / max(inputs, 1),
        "device_s": result.counters["device_s"],
        "blocks_fetched": result.counters["blocks_fetched"],
    }


def bounds(scenario: Scenario, run: ClusterRun, records: Sequence[TraceRecord]) -> dict[str, float | None]:
    """Returns what no policy can beat in a row. A mean over some of the requests has no bound."""
    assert isinstance(run.spec, ClusterSpec)
    as_run = run.records(records)
    return {
        "in_time": most_in_time(as_run, run.spec),
        "mean_ttft_s": lowest_mean_ttft_s(as_run, run.spec) if scenario.admission == "none" else None,
    }


def compared(
    scenario: Scenario,
    all_runs: Sequence[tuple[ClusterRun, dict[str, float]]],
    row_bounds: Mapping[str, float | None],
) -> dict[str, Any]:
    """Returns a row of the table, with the best run of Algorithm 1."""
    (_, ours), *theirs = all_runs
    best_run, best = min(theirs, key=lambda each: each[1]["mean_ttft_s"])
    assert isinstance(best_run.spec, ClusterSpec)
    return {
        "trace": scenario.trace,
        "speedup": scenario.speedup,
        "prefill": scenario.num_prefill,
        "decode": scenario.num_decode,
        "admission": scenario.admission,
        "requests": ours["requests"],
        "threshold": best_run.spec.balancing_threshold,
        "thresholds": {
            str(run.spec.balancing_threshold): row["mean_ttft_s"]
            for run, row in theirs
            if isinstance(run.spec, ClusterSpec)
        },
        "algorithm_1": best,
        "moonserve": ours,
        "bounds": row_bounds,
        "ratios": {name: _ratio(ours[name], best[name]) for name in RATIOS},
    }


RATIOS = ("mean_ttft_s", "p90_ttft_s", "p99_ttft_s", *(f"effective_{tbt_slo_s:g}" for tbt_slo_s in TBT_SLOS_S))


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, "out/policies/policies.json")
    parser.add_argument("--page", type=Path, default=Path("docs/policies.md"))
    arguments = parser.parse_args(argv)
    limit = QUICK_REQUESTS if arguments.quick else None
    folder, found = arguments.output.parent, Traces(arguments.trace, arguments.output.parent)
    rows = []
    for scenario in SCENARIOS:
        runs = scenario.runs(limit)
        trace = found.file(scenario.trace)
        results = run_simulations(runs, trace, folder, arguments.processes)
        got = map(figures, results)
        row_bounds = bounds(scenario, runs[0], trace.records())
        rows.append(compared(scenario, list(zip(runs, got, strict=True)), row_bounds))
    run = ABLATED.run(OURS, DEFAULT_BALANCING_THRESHOLD, limit)
    works = [Ablation(run=run, terms=terms) for terms in ABLATIONS.values()]
    results = run_simulations(works, found.file(ABLATED.trace), folder, arguments.processes)
    got = map(figures, results)
    result = {
        "rows": rows,
        "ablations": dict(zip(ABLATIONS, got, strict=True)),
        "ablated": {
            "trace": ABLATED.trace,
            "speedup": ABLATED.speedup,
            "requests": run.num_requests,
        },
    }
    write_json(arguments.output, result)
    page = as_page(json.loads(arguments.output.read_text()))
    print(page)
    if not arguments.quick:
        arguments.page.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
