"""Figures of a simulation, and a table of several simulations for a terminal.

The figures are those of a replay (`traces.figures`), under the same names. Figures that only a replay has are left out:
single gaps (ITL), lateness of sending, the ideal hit ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from traces.analysis.measures import mean_rate
from traces.figures import Completed, latency_figures, request_figures, spread
from traces.output import text_table
from traces.reports.numbers import milliseconds, percent, plain
from traces.simulator.results import End, RequestOutcome, SimulationResult


def summary(result: SimulationResult) -> dict[str, Any]:
    """Returns a result's figures. Latencies are in milliseconds, NaN without values. `errors`: requests by reason.

    In addition to a replay's: `request_rate` (arrivals per second, None if they span no time), the parts of a first
    token's wait (`queue_ms`, `load_ms`, `prefill_ms`) and `ttft_error_ms`, predicted − actual.
    """
    done = [each for each in result.outcomes if each.end is End.COMPLETED]
    completed = [_completed(each, result) for each in done]
    return {
        "name": result.name,
        "request_rate": mean_rate([each.arrived_s for each in result.outcomes]),
        **request_figures(
            completed,
            num_requests=len(result.outcomes),
            num_rejected=sum(each.end is End.REJECTED for each in result.outcomes),
            duration_s=result.duration_s,
            ttft_slo_s=result.ttft_slo_s,
            tbt_slo_s=result.tbt_slo_s,
        ),
        **latency_figures(completed),
        **spread("queue_ms", (each.queue_s for each in done)),
        **spread("load_ms", (each.load_s for each in done)),
        **spread("prefill_ms", (each.prefill_s for each in done)),
        **spread("ttft_error_ms", (_ttft_error_s(each) for each in done)),
        "errors": errors(result),
    }


def errors(result: SimulationResult) -> dict[str, int]:
    """Returns the number of requests ended by each reason, including rejections, most frequent first."""
    counts = Counter(error_of(each) for each in result.outcomes if each.end is not End.COMPLETED)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def error_of(outcome: RequestOutcome) -> str:
    """Returns end and reason of a request, such as "rejected: ttft_slo"."""
    return f"{outcome.end}: {outcome.reason or 'no reason given'}"


def _completed(outcome: RequestOutcome, result: SimulationResult) -> Completed:
    several = outcome.tbt_s is not None
    return Completed(
        input_tokens=outcome.input_length,
        cached_tokens=outcome.cached_tokens,
        output_tokens=outcome.output_length,
        ttft_s=outcome.ttft_s,
        tbt_s=outcome.tbt_s,
        tpot_s=outcome.mean_gap_s if several else None,
        e2e_s=None if outcome.finished_s is None else outcome.finished_s - outcome.arrived_s,
        is_effective=outcome.is_effective(ttft_slo_s=result.ttft_slo_s, tbt_slo_s=result.tbt_slo_s),
    )


def _ttft_error_s(outcome: RequestOutcome) -> float | None:
    """Returns predicted − actual TTFT; None without a prediction or a token."""
    if outcome.ttft_s is None or not outcome.predicted_ttft_s:
        return None
    return outcome.predicted_ttft_s - outcome.ttft_s


_LATENCIES = ("mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "p90_tbt_ms")
COLUMNS = (
    "requests", "rejected", "failed", "goodput/s", "effective", "hits", "TTFT ms mean", "p50",
    "p90", "p99", "TBT ms p90",
)  # fmt: skip
_MAX_NAME = 32


def format_summary(results: Sequence[SimulationResult]) -> str:
    """Returns a table with one row per result. Rejections are next to the latencies, which benefit from them."""
    rows = [[_short(" ".join(each.name.split())), *cells(summary(each)), f"{each.wall_s:.1f}"] for each in results]
    return text_table(("result", *COLUMNS, "took s"), rows)


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a summary, matching `COLUMNS`."""
    return [
        plain(figures["num_requests"]),
        plain(figures["rejected"]),
        plain(figures["failed"]),
        f"{figures['request_goodput']:.2f}",
        percent(figures["effective_fraction"]),
        percent(figures["hit_ratio"]),
        *(milliseconds(figures[name]) for name in _LATENCIES),
    ]


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
