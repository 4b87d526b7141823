"""Figures of a replay, worked out by hand."""

from __future__ import annotations

import math

import pytest

from protocol.timeline import Timeline, mean, percentile
from traces.client import Outcome
from traces.report import Sent, build_report, format_report


def sent(outcome: Outcome, lateness_s: float = 0.0) -> Sent:
    return Sent(lateness_s=lateness_s, ideal_cached_tokens=4, input_length=10, outcome=outcome)


def success(*token_at: float, cached: int = 2) -> Outcome:
    return Outcome(
        status=200, error=None, timeline=Timeline(1.0, token_at), prompt_tokens=10,
        cached_tokens=cached,
    )  # fmt: skip


def test_timeline_figures() -> None:
    timeline = Timeline(1.0, (1.5, 1.6, 1.9, 2.0))
    assert timeline.ttft_s == pytest.approx(0.5)
    assert timeline.e2e_s == pytest.approx(1.0)
    assert timeline.tpot_s == pytest.approx(0.5 / 3)
    assert timeline.gaps_s == pytest.approx([0.1, 0.3, 0.1])
    assert timeline.tbt_s == pytest.approx(0.3)
    assert Timeline(0.0, (1.0,)).tbt_s == Timeline(0.0, (1.0,)).tpot_s == 0.0


def test_tbt_is_the_mean_of_the_longest_tenth_of_the_gaps() -> None:
    instants = [0.0]
    for gap in [1] * 18 + [5, 9]:
        instants.append(instants[-1] + gap)
    assert Timeline(0.0, tuple(instants)).tbt_s == 7


def test_percentiles_interpolate() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([1, 2], 75) == 1.75
    assert math.isnan(percentile([], 50))
    assert math.isnan(mean([]))


def test_rejected_and_failed_requests_are_misses_beside_the_latencies() -> None:
    requests = [
        sent(success(1.2, 1.3)),
        sent(success(9.0, 9.1)),
        sent(Outcome(status=429, error="busy", timeline=None)),
        sent(Outcome(status=0, error="gone", timeline=None), lateness_s=0.5),
    ]
    report = build_report(requests, duration_s=2.0, ttft_slo_s=1.0, tbt_slo_s=0.2)
    assert (report["completed"], report["rejected"], report["failed"]) == (2, 1, 1)
    assert report["request_goodput"] == 0.5
    assert report["effective_fraction"] == 0.25
    assert report["hit_ratio"] == pytest.approx(0.2)
    assert report["ideal_hit_ratio"] == pytest.approx(0.4)
    assert report["p99_lateness_ms"] == pytest.approx(485)
    assert report["errors"] == {"429: busy": 1, "0: gone": 1}
    table = format_report(report)
    assert "rejected 1" in table
    assert "ideal 40.0%" in table


def test_scripts_that_read_a_report_of_vllm_bench_serve_find_its_names() -> None:
    """Those of its JSON result that are about all requests together, as its version 0.31 writes them."""
    latencies = [
        f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")
    ]
    totals = [
        "num_prompts",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
    ]
    rates = ["request_throughput", "request_goodput", "output_throughput", "total_token_throughput"]
    report = build_report(
        [sent(success(1.2, 1.4)), sent(success(1.4, 1.6))],
        duration_s=2.0,
        ttft_slo_s=1.0,
        tbt_slo_s=0.2,
    )
    assert all(isinstance(report[name], int | float) for name in [*latencies, *totals, *rates])
    assert report["std_ttft_ms"] == pytest.approx(100)
