"""Figures of a replay, worked out by hand."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest

from protocol.timeline import Timeline, mean, percentile
from traces.client import Outcome
from traces.report import Sent, build_report, format_report


def sent(outcome: Outcome, lateness_s: float = 0.0) -> Sent:
    return Sent(lateness_s=lateness_s, ideal_cached_tokens=4, input_length=10, outcome=outcome)


def success(*token_at: float) -> Sent:
    timeline = Timeline(1.0, token_at)
    return sent(Outcome(status=200, error=None, timeline=timeline, prompt_tokens=10, cached_tokens=2))


def test_timeline_figures() -> None:
    """TBT is the mean of the longest tenth of the gaps."""
    timeline = Timeline(1.0, (1.5, 1.6, 1.9, 2.0))
    found = (timeline.ttft_s, timeline.e2e_s, timeline.tpot_s, timeline.tbt_s)
    assert found == pytest.approx((0.5, 1.0, 0.5 / 3, 0.3))
    assert timeline.gaps_s == pytest.approx([0.1, 0.3, 0.1])
    assert Timeline(0.0, (1.0,)).tbt_s == Timeline(0.0, (1.0,)).tpot_s == 0.0
    assert Timeline(0.0, tuple(accumulate([0.0, *[1.0] * 18, 5.0, 9.0]))).tbt_s == 7


def test_percentiles_interpolate() -> None:
    assert (percentile([3, 1, 2], 50), percentile([1, 2], 75)) == (2, 1.75)
    assert math.isnan(percentile([], 50) + mean([]))


def test_rejected_and_failed_requests_are_misses_beside_the_latencies() -> None:
    requests = [
        success(1.2, 1.3),
        success(9.0, 9.1),
        sent(Outcome(status=429, error="busy", timeline=None)),
        sent(Outcome(status=0, error="gone", timeline=None), lateness_s=0.5),
    ]
    report = build_report(requests, duration_s=2.0, ttft_slo_s=1.0, tbt_slo_s=0.2)
    expected = {
        "completed": 2,
        "rejected": 1,
        "failed": 1,
        "request_goodput": 0.5,
        "effective_fraction": 0.25,
        "hit_ratio": 0.2,
        "ideal_hit_ratio": 0.4,
        "p99_lateness_ms": 485,
    }
    assert {name: report[name] for name in expected} == pytest.approx(expected)
    assert report["errors"] == {"429: busy": 1, "0: gone": 1}
    table = format_report(report)
    assert "rejected 1" in table
    assert "ideal 40.0%" in table


def test_scripts_that_read_a_report_of_vllm_bench_serve_find_its_names() -> None:
    """Those of its JSON result that are about all requests together, as its version 0.31 writes them."""
    kinds, times = ("mean", "median", "std", "p99"), ("ttft", "tpot", "itl", "e2el")
    names = [f"{kind}_{name}_ms" for kind in kinds for name in times]
    names += ["num_prompts", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"]
    names += ["request_throughput", "request_goodput", "output_throughput", "total_token_throughput"]
    report = build_report([success(1.2, 1.4), success(1.4, 1.6)], duration_s=2.0, ttft_slo_s=1.0, tbt_slo_s=0.2)
    assert all(isinstance(report[name], int | float) for name in names)
    assert report["std_ttft_ms"] == pytest.approx(100)
