"""Figures over many requests: counts, throughput, goodput, hit ratio, latencies. Pure.

Each figure has one definition. Replays and simulations both use it, so that their reports can be compared. Rejected and
failed requests count as misses of the objectives. Latencies cover completed requests only. Names follow `vllm bench
serve`. Does not know where a request was computed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moonserve.protocol.latency import mean, percentile

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """Contribution of one completed request to the figures."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None  # None = no token
    tbt_s: float | None  # None, like tpot_s, with fewer than two tokens
    tpot_s: float | None
    e2e_s: float | None  # None = no token
    is_effective: bool  # meets both objectives


def request_metrics(
    completed: Sequence[CompletedRequest],
    *,
    num_requests: int,
    num_rejected: int,
    duration_s: float,
    ttft_slo_s: float,
    tbt_slo_s: float,
) -> dict[str, Any]:
    """Returns counts, rates per second and ratios. A ratio with a denominator of 0 is 0."""
    output_tokens = sum(each.output_tokens for each in completed)
    input_tokens = sum(each.input_tokens for each in completed)
    good = sum(each.is_effective for each in completed)
    return {
        "num_requests": num_requests,
        "num_prompts": num_requests,
        "completed": len(completed),
        "rejected": num_rejected,
        "failed": num_requests - len(completed) - num_rejected,
        "duration": duration_s,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": ratio(len(completed), duration_s),
        "output_throughput": ratio(output_tokens, duration_s),
        "total_token_throughput": ratio(input_tokens + output_tokens, duration_s),
        "ttft_slo_s": ttft_slo_s,
        "tbt_slo_s": tbt_slo_s,
        "request_goodput": ratio(good, duration_s),
        "effective_fraction": ratio(good, num_requests),
        "hit_ratio": ratio(sum(each.cached_tokens for each in completed), input_tokens),
    }


def latency_metrics(completed: Sequence[CompletedRequest]) -> dict[str, float]:
    """Returns the spreads of TTFT, TBT, TPOT and end-to-end time in milliseconds."""
    return {
        **spread_ms("ttft_ms", (each.ttft_s for each in completed)),
        **spread_ms("tbt_ms", (each.tbt_s for each in completed)),
        **spread_ms("tpot_ms", (each.tpot_s for each in completed)),
        **spread_ms("e2el_ms", (each.e2e_s for each in completed)),
    }


def spread_ms(name_ms: str, seconds: Iterable[float | None]) -> dict[str, float]:
    """Returns mean, std, median, p50, p90 and p99 in milliseconds. Ignores None; all are NaN if no value is left."""
    values = [each * 1000 for each in seconds if each is not None]
    ordered = sorted(values)  # sorting a sorted list again costs little
    middle = mean(values)
    distance = math.hypot(*(each - middle for each in values))  # avoids overflow of large squares
    return {
        f"mean_{name_ms}": middle,
        f"std_{name_ms}": distance / math.sqrt(len(values)) if values else math.nan,
        f"median_{name_ms}": percentile(ordered, 50),
        **{f"p{percent}_{name_ms}": percentile(ordered, percent) for percent in PERCENTS},
    }


def ratio(part: float, whole: float) -> float:
    """Returns part / whole, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
