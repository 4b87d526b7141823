"""Results of a simulation. Frozen data; times are seconds of virtual time since the start of the trace."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from moonserve.protocol.errors import ConfigError
from moonserve.traces.output import format_count, format_ms, format_percent, text_table
from moonserve.traces.request_metrics import CompletedRequest, latency_metrics, request_metrics, spread_ms
from moonserve.traces.workload.statistics import mean_rate


class End(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # by admission; reported next to the latencies, which benefit from it
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """Result of one request of the trace."""

    index: int
    arrived_s: float
    input_length: int
    output_length: int
    end: End
    reason: str = ""  # of a rejection or failure
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    queue_s: float = 0.0  # at the prefill machine
    load_s: float = 0.0  # of the prefix, as far as it delayed the prompt
    prefill_s: float = 0.0  # device time of the prompt
    predicted_ttft_s: float = 0.0
    ttft_s: float | None = None  # None = no token
    tbt_s: float | None = None  # mean of the longest tenth of the gaps; None = fewer than two tokens
    mean_gap_s: float | None = None
    finished_s: float | None = None  # since the start of the trace

    def is_effective(self, *, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """True if completed within both limits (the paper's *effective request*)."""
        return (
            self.end is End.COMPLETED
            and self.ttft_s is not None
            and self.ttft_s <= ttft_slo_s
            and (self.tbt_s is None or self.tbt_s <= tbt_slo_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSample:
    """State of one instance at one time."""

    at_s: float
    instance_id: str
    queued: int  # waiting requests
    running: int
    context_tokens: int
    predicted_queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """Number of machines that hold each of the most popular blocks, at one time."""

    at_s: float
    replicas: tuple[int, ...]  # by number of uses so far, most popular first


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The complete result of one simulation."""

    name: str  # distinguishes it from the other results on a page
    outcomes: tuple[RequestOutcome, ...]
    ttft_slo_s: float
    tbt_slo_s: float
    duration_s: float  # from the first arrival to the last end
    instances: tuple[InstanceSample, ...] = ()
    replicas: tuple[ReplicaSample, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)  # "bytes_moved", …
    wall_s: float = 0.0  # real seconds that the simulation took


# Figures of a simulation, and a table of several simulations for a terminal.
#
# The figures are those of a replay (`traces.request_metrics`), under the same names. Figures that only a replay has
# are left out: single gaps (ITL), lateness of sending, the ideal hit ratio.


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
        **request_metrics(
            completed,
            num_requests=len(result.outcomes),
            num_rejected=sum(each.end is End.REJECTED for each in result.outcomes),
            duration_s=result.duration_s,
            ttft_slo_s=result.ttft_slo_s,
            tbt_slo_s=result.tbt_slo_s,
        ),
        **latency_metrics(completed),
        **spread_ms("queue_ms", (each.queue_s for each in done)),
        **spread_ms("load_ms", (each.load_s for each in done)),
        **spread_ms("prefill_ms", (each.prefill_s for each in done)),
        **spread_ms("ttft_error_ms", (_ttft_error_s(each) for each in done)),
        "errors": error_counts(result),
    }


def error_counts(result: SimulationResult) -> dict[str, int]:
    """Returns the number of requests ended by each reason, including rejections, most frequent first."""
    counts = Counter(error_of(each) for each in result.outcomes if each.end is not End.COMPLETED)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def error_of(outcome: RequestOutcome) -> str:
    """Returns end and reason of a request, such as "rejected: ttft_slo"."""
    return f"{outcome.end}: {outcome.reason or 'no reason given'}"


def _completed(outcome: RequestOutcome, result: SimulationResult) -> CompletedRequest:
    several = outcome.tbt_s is not None
    return CompletedRequest(
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
SUMMARY_COLUMNS = (
    "requests", "rejected", "failed", "goodput/s", "effective", "hits", "TTFT ms mean", "p50",
    "p90", "p99", "TBT ms p90",
)  # fmt: skip
_MAX_NAME = 32


def format_summary(results: Sequence[SimulationResult]) -> str:
    """Returns a table with one row per result. Rejections are next to the latencies, which benefit from them."""
    rows = [
        [_short(" ".join(each.name.split())), *summary_cells(summary(each)), f"{each.wall_s:.1f}"] for each in results
    ]
    return text_table(("result", *SUMMARY_COLUMNS, "took s"), rows)


def summary_cells(figures: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a summary, matching `SUMMARY_COLUMNS`."""
    return [
        format_count(figures["num_requests"]),
        format_count(figures["rejected"]),
        format_count(figures["failed"]),
        f"{figures['request_goodput']:.2f}",
        format_percent(figures["effective_fraction"]),
        format_percent(figures["hit_ratio"]),
        *(format_ms(figures[name]) for name in _LATENCIES),
    ]


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


# Results as JSON and back: `results.json`.
#
# Rows are stored as columns (`{"arrived_s": […], "ttft_s": […]}`), which takes a third of the space and suits data
# frames. Numbers that JSON lacks are strings: `"Infinity"`, `"NaN"`. Each result includes its summary for other
# programs; reading ignores it.

RESULTS_FORMAT = 2

_ROWS = {"outcomes": RequestOutcome, "instances": InstanceSample, "replicas": ReplicaSample}
_RESULTS = TypeAdapter(list[SimulationResult])


def results_to_json(results: Sequence[SimulationResult]) -> str:
    """Returns results as JSON. Equal results give equal text. Numpy numbers are allowed."""
    whole = {"format": RESULTS_FORMAT, "results": [_result(each) for each in results]}
    text = to_json(whole, inf_nan_mode="strings", fallback=lambda number: number.item())
    return text.decode() + "\n"


def _result(result: SimulationResult) -> dict[str, Any]:
    stored = {field.name: getattr(result, field.name) for field in fields(result)}
    for name, row_type in _ROWS.items():
        stored[name] = {column.name: [getattr(row, column.name) for row in stored[name]] for column in fields(row_type)}
    return {"summary": summary(result), **stored}


def results_from_json(text: str) -> list[SimulationResult]:
    """Reads the output of `results_to_json`. Raises ConfigError for any other text."""
    try:
        whole = json.loads(text)
        if whole["format"] != RESULTS_FORMAT:
            raise ConfigError(f"the results are of format {whole['format']}; this reads {RESULTS_FORMAT}")
        for stored in whole["results"]:
            for name in _ROWS:
                rows = zip(*stored[name].values(), strict=True)
                stored[name] = [dict(zip(stored[name], row, strict=True)) for row in rows]
        return _RESULTS.validate_python(whole["results"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"these are no results of simulations: {error!r}") from error
