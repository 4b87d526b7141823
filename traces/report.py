"""What a replay found: one table for people, one JSON object for programs.

Field names follow `vllm bench serve`; rejected and failed requests count as misses of the objective and stand beside
the latencies they bought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.timeline import Timeline, mean, percentile
from traces.client import Outcome

_PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of a replay and how it ended."""

    lateness_s: float  # of our own sending
    ideal_cached_tokens: int
    input_length: int
    outcome: Outcome


def build_report(
    sent: Sequence[Sent], *, duration_s: float, ttft_slo_s: float, tbt_slo_s: float
) -> dict[str, Any]:
    """The figures of a replay; latencies in milliseconds, over the requests that succeeded."""
    done = [s.outcome for s in sent if s.outcome.succeeded]
    timelines = [outcome.timeline for outcome in done if outcome.timeline]
    rejected = sum(s.outcome.rejected for s in sent)
    good = sum(t.meets(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s) for t in timelines)
    output_tokens = sum(len(t.token_at) for t in timelines)
    input_tokens = sum(outcome.prompt_tokens for outcome in done)
    return {
        "num_requests": len(sent),
        "completed": len(done),
        "rejected": rejected,
        "failed": len(sent) - len(done) - rejected,
        "duration": duration_s,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "ttft_slo_s": ttft_slo_s,
        "tbt_slo_s": tbt_slo_s,
        "request_goodput": good / duration_s,
        "effective_fraction": good / len(sent) if sent else 0.0,
        "hit_ratio": _ratio(sum(o.cached_tokens for o in done), input_tokens),
        "ideal_hit_ratio": _ratio(
            sum(s.ideal_cached_tokens for s in sent if s.outcome.succeeded),
            sum(s.input_length for s in sent if s.outcome.succeeded),
        ),
        **_latencies(timelines),
        **_spread("lateness_ms", [s.lateness_s * 1000 for s in sent]),
        "errors": _errors(sent),
    }


def _latencies(timelines: Sequence[Timeline]) -> dict[str, float]:
    figures = {
        "ttft_ms": [t.ttft_s for t in timelines],
        "tbt_ms": [t.tbt_s for t in timelines if len(t.token_at) > 1],
        "tpot_ms": [t.tpot_s for t in timelines if len(t.token_at) > 1],
        "itl_ms": [gap for t in timelines for gap in t.gaps_s],
        "e2el_ms": [t.e2e_s for t in timelines],
    }
    spreads: dict[str, float] = {}
    for name, seconds in figures.items():
        spreads.update(_spread(name, [s * 1000 for s in seconds]))
    return spreads


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"mean_{name}": mean(values),
        f"median_{name}": percentile(values, 50),
        **{f"p{percent}_{name}": percentile(values, percent) for percent in _PERCENTS},
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _errors(sent: Sequence[Sent]) -> dict[str, int]:
    """How often each error was met, rejections included."""
    counts: dict[str, int] = {}
    for entry in sent:
        if entry.outcome.error is not None:
            key = f"{entry.outcome.status}: {entry.outcome.error[:200]}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def format_report(report: dict[str, Any]) -> str:
    """The report as a table for a terminal."""
    lines = [
        "requests     {num_requests:>8}   completed {completed}  rejected {rejected}  failed {failed}",
        "duration     {duration:>8.1f} s",
        "throughput   {request_throughput:>8.2f} requests/s   {output_throughput:.0f} output tokens/s   "
        "{total_token_throughput:.0f} tokens/s",
        "goodput      {request_goodput:>8.2f} requests/s   {effective_fraction:.1%} of all meet "
        "TTFT <= {ttft_slo_s:g} s and TBT <= {tbt_slo_s:g} s",
        "hit ratio    {hit_ratio:>8.1%}   ideal {ideal_hit_ratio:.1%} (unlimited cache)",
    ]
    text = [line.format_map(report) for line in lines]
    text.append(f"{'':12} {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9}")
    for name in ("ttft", "tbt", "tpot", "itl", "e2el", "lateness"):
        cells = [report[f"{kind}_{name}_ms"] for kind in ("mean", "p50", "p90", "p99")]
        text.append(f"{name + ' ms':12}" + "".join(f" {cell:>9.1f}" for cell in cells))
    text += [f"error        {count:>8} × {what}" for what, count in report["errors"].items()]
    return "\n".join(text)
