"""The report of a replay: a table for the terminal and a JSON object for programs.

Field names follow `vllm bench serve`. Rejected and failed requests count as misses of the objectives and are reported
next to the latencies, because rejecting requests makes latencies better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from traces.client import Outcome
from traces.figures import Completed, latency_figures, ratio, request_figures, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of a replay and its result."""

    lateness_s: float  # delay of the client's own sending
    ideal_cached_tokens: int
    input_length: int
    outcome: Outcome


def build_report(sent: Sequence[Sent], *, duration_s: float, ttft_slo_s: float, tbt_slo_s: float) -> dict[str, Any]:
    """Returns the figures of a replay. Latencies are in milliseconds and cover the requests that succeeded."""
    done = [s.outcome for s in sent if s.outcome.succeeded]
    completed = [_completed(each, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s) for each in done]
    gaps_s = [gap for each in done if each.timeline for gap in each.timeline.gaps_s]
    return {
        **request_figures(
            completed,
            num_requests=len(sent),
            num_rejected=sum(s.outcome.rejected for s in sent),
            duration_s=duration_s,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
        ),
        "ideal_hit_ratio": ratio(
            sum(s.ideal_cached_tokens for s in sent if s.outcome.succeeded),
            sum(s.input_length for s in sent if s.outcome.succeeded),
        ),
        **latency_figures(completed),
        **spread("itl_ms", gaps_s),
        **spread("lateness_ms", (s.lateness_s for s in sent)),
        "errors": _errors(sent),
    }


def _completed(outcome: Outcome, *, ttft_slo_s: float, tbt_slo_s: float) -> Completed:
    """Converts a successful outcome. Without tokens it has no latencies and is not effective."""
    timeline = outcome.timeline
    several = timeline is not None and len(timeline.token_at) > 1
    return Completed(
        input_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        output_tokens=len(timeline.token_at) if timeline else 0,
        ttft_s=timeline.ttft_s if timeline else None,
        tbt_s=timeline.tbt_s if timeline and several else None,
        tpot_s=timeline.tpot_s if timeline and several else None,
        e2e_s=timeline.e2e_s if timeline else None,
        is_effective=timeline is not None and timeline.meets(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s),
    )


def _errors(sent: Sequence[Sent]) -> dict[str, int]:
    """Returns the number of occurrences of each error, including rejections."""
    outcomes = (entry.outcome for entry in sent)
    return Counter(f"{o.status}: {o.error[:200]}" for o in outcomes if o.error is not None)


def format_report(report: dict[str, Any]) -> str:
    """Formats the report as a table for a terminal."""
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
