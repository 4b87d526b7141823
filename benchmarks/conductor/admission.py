"""`python -m benchmarks.conductor.admission --trace FILE [--quick]`: simulates how many requests each admission
rejects.

Claim (arXiv 2407.00079, §7): early rejection by the current decode load rejects fewer requests than the baseline, which
checks the decode load after prefill, and rejection by the predicted load rejects fewer still. Rows are loads,
objectives and traces. Columns are admissions: requests rejected in total and at the handoff, the share of prefill time
wasted on requests rejected at the handoff, and requests that kept both objectives. Prints a table and writes JSON below
out/. Finished simulations are kept there, so that an interrupted run continues.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.conductor.simulated_runs import PUBLISHED, Traces, argument_parser, run_simulations
from benchmarks.harness.measure import table, write_json
from benchmarks.reproduction.testbed import (
    MOONCAKE,
    costly_decoding,
    effective_share,
    mooncake_run,
    rejected_share,
    wasted_device_s,
)
from moonserve.traces.experiments.parallel_runs import ClusterRun
from moonserve.traces.simulator.results import SimulationResult
from moonserve.traces.simulator.spec import LATE

QUICK_REQUESTS = 2_000
PER_REQUESTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionVariant:
    """A column of the table: a way of admission."""

    name: str
    admission: str
    double_check: bool = False


NO_ADMISSION = AdmissionVariant(name="none", admission="none")
BASELINE = AdmissionVariant(name="baseline", admission=LATE)
EARLY = AdmissionVariant(name="early", admission="current", double_check=True)
PREDICTIVE = AdmissionVariant(name="predictive", admission="predicted", double_check=True)
# Like live machines, which accept every placed request.
EARLY_UNCHECKED = AdmissionVariant(name="early, unchecked", admission="current")
PREDICTIVE_UNCHECKED = AdmissionVariant(name="predictive, unchecked", admission="predicted")
VARIANTS = (NO_ADMISSION, BASELINE, EARLY, PREDICTIVE, EARLY_UNCHECKED, PREDICTIVE_UNCHECKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A row of the table."""

    trace: str = PUBLISHED
    speedup: float = 2.0
    decode_cost_factor: float = 6.0  # factor on the published decode cost per sequence and context
    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 0.1
    num_prefill: int = 8
    num_decode: int = 8
    num_requests: int | None = None  # None = the whole trace

    def run(self, way: AdmissionVariant, limit: int | None) -> ClusterRun:
        run = mooncake_run(
            self.speedup,
            model=costly_decoding(self.decode_cost_factor),
            admission=way.admission,
            double_check=way.double_check,
            ttft_slo_s=self.ttft_slo_s,
            tbt_slo_s=self.tbt_slo_s,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
        )
        return ClusterRun(spec=run.spec, speedup=run.speedup, num_requests=limit or self.num_requests)

    @property
    def name(self) -> str:
        parts = [self.trace, f"{self.speedup:g}×", f"dear {self.decode_cost_factor:g}"]
        if (self.num_prefill, self.num_decode) != (MOONCAKE.num_prefill, MOONCAKE.num_decode):
            parts.append(f"{self.num_prefill}P{self.num_decode}D")
        if (self.ttft_slo_s, self.tbt_slo_s) != (MOONCAKE.ttft_slo_s, MOONCAKE.tbt_slo_s):
            parts.append(f"{self.ttft_slo_s:g} s / {self.tbt_slo_s:g} s")
        return ", ".join(parts)


PART = 3_000  # requests: 7 minutes at twice the trace's speed
SETTINGS = tuple(
    replace(setting, num_requests=PART)
    for setting in (
        Setting(speedup=1.5),
        Setting(speedup=2.0),
        Setting(speedup=3.0),
        Setting(speedup=2.0, decode_cost_factor=5.0),
        Setting(speedup=2.5, decode_cost_factor=4.5),
        Setting(speedup=2.0, decode_cost_factor=1.0),
        Setting(speedup=2.0, ttft_slo_s=10.0),
        Setting(speedup=2.0, decode_cost_factor=12.0, tbt_slo_s=0.2),
        Setting(trace="conversation seed 11"),
        Setting(trace="conversation seed 12"),
        Setting(trace="tool-agent seed 11", speedup=2.5),
    )
)


def figures(result: SimulationResult) -> dict[str, float]:
    """Returns figures per 1,000 requests, except `wasted_s` and `wasted`: a share of all prefill seconds."""
    late = sum(each.reason == "tbt_slo_at_handoff" for each in result.outcomes)
    at_handoff = late / len(result.outcomes)
    return {
        "rejected": PER_REQUESTS * rejected_share(result),
        "on_arrival": PER_REQUESTS * (rejected_share(result) - at_handoff),
        "at_handoff": PER_REQUESTS * at_handoff,
        "wasted_s": wasted_device_s(result),
        "wasted": wasted_device_s(result) / result.counters["device_s"],
        "effective": PER_REQUESTS * effective_share(result, result.tbt_slo_s, result.ttft_slo_s),
    }


def rows_of(
    settings: Sequence[Setting], traces: Traces, folder: Path, limit: int | None, processes: int
) -> Iterator[tuple[Setting, dict[str, dict[str, float]]]]:
    """Yields each setting with its figures by name of the way."""
    for setting in settings:
        runs = [setting.run(way, limit) for way in VARIANTS]
        results = run_simulations(runs, traces.file(setting.trace), folder, processes)
        yield setting, {way.name: figures(each) for way, each in zip(VARIANTS, results, strict=True)}


def verdict(row: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the verdict on the claim: early rejects fewer than the baseline, and predictive fewer than early."""
    baseline, early, predictive = (row[way.name]["rejected"] for way in (BASELINE, EARLY, PREDICTIVE))
    if baseline > early > predictive:
        return "holds"
    return "predictive fewest" if predictive < min(baseline, early) else "not"


def as_table(rows: Sequence[tuple[Setting, Mapping[str, Mapping[str, float]]]]) -> str:
    """Returns the table. Per way: rejected (of them at the handoff), wasted share of prefill, effective."""
    headers = ("setting", *(way.name for way in VARIANTS), "order")
    body = [
        [
            setting.name,
            *(
                f"{each['rejected']:.0f} ({each['at_handoff']:.0f}), {each['wasted']:.0%}, **{each['effective']:.0f}**"
                for each in (row[way.name] for way in VARIANTS)
            ),
            verdict(row),
        ]
        for setting, row in rows
    ]
    return table(headers, body)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__, "out/admission/admission.json")
    parser.add_argument("--first", type=int, default=0, help="number of the first setting")
    parser.add_argument("--last", type=int, default=None, help="number of the one to stop before")
    arguments = parser.parse_args(argv)
    limit = QUICK_REQUESTS if arguments.quick else None
    folder = arguments.output.parent
    settings = SETTINGS[arguments.first : arguments.last]
    rows = list(rows_of(settings, Traces(arguments.trace, folder), folder, limit, arguments.processes))
    found: list[dict[str, Any]] = [{"setting": s.name, "ways": row} for s, row in rows]
    write_json(arguments.output, {"rows": found})
    print(as_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
