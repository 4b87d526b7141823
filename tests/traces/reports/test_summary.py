"""Tests of the figures of replays and simulations, compared with values calculated by hand, and of their tables."""

import math
from itertools import accumulate

import pytest

from moonserve.protocol.latency import Timeline, mean, percentile
from moonserve.traces.client import Outcome
from moonserve.traces.replay import RequestResult, build_report, format_report
from moonserve.traces.simulator.results import End, RequestOutcome, format_summary, summary
from tests.traces.reports.made_up import made_up, outcome, rejected, result


def four() -> list[RequestOutcome]:
    """Returns four requests: effective, too late, rejected, and failed after its first token."""
    return [
        outcome(0, ttft_s=1.0, predicted_ttft_s=1.5, queue_s=0.25, finished_s=3.0),
        outcome(1, ttft_s=40.0, predicted_ttft_s=0.0, input_length=300, cached_tokens=0,
                queue_s=0.75, finished_s=51.0),
        rejected(2, predicted_ttft_s=70.0),
        outcome(4, end=End.FAILED, reason="peer_lost", ttft_s=2.0, finished_s=None),
    ]  # fmt: skip


def test_figures_of_completed_late_rejected_and_failed_requests() -> None:
    """Counts, rates and hits are defined as for a replay. Latencies are of completed requests, in milliseconds, and
    prediction errors include only requests with a prediction."""
    figures = summary(result("four", *four(), duration_s=50.0))
    counts = [figures[name] for name in ("num_requests", "completed", "rejected", "failed")]
    assert counts == [4, 2, 1, 1]
    expected = {
        "request_throughput": 2 / 50, "request_goodput": 1 / 50, "effective_fraction": 1 / 4,
        "hit_ratio": 50 / 400, "output_throughput": 22 / 50, "request_rate": 3 / 4,
        "mean_ttft_ms": 20_500, "p50_ttft_ms": 20_500, "median_ttft_ms": 20_500,
        "p90_ttft_ms": 36_100, "mean_tbt_ms": 50, "mean_tpot_ms": 40, "mean_e2el_ms": 26_500,
        "mean_queue_ms": 500, "mean_ttft_error_ms": 500,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_reasons_are_counted_the_most_frequent_first() -> None:
    outcomes = [rejected(index, reason) for index, reason in enumerate(("tbt", "ttft", "ttft", ""))]
    counts = [("rejected: ttft", 2), ("rejected: no reason given", 1), ("rejected: tbt", 1)]
    assert list(summary(result("r", *outcomes))["errors"].items()) == counts


def test_a_single_token_or_no_request_are_figures_too() -> None:
    one = summary(result("one", outcome(0, output_length=1, tbt_s=None, mean_gap_s=None)))
    assert (one["mean_ttft_ms"], one["request_goodput"]) == (1000, 0.1)
    none = summary(result("none", duration_s=0.0))
    assert none["num_requests"] == none["request_goodput"] == none["hit_ratio"] == 0
    assert none["request_rate"] is None
    assert math.isnan(one["mean_tbt_ms"] + one["mean_tpot_ms"])
    assert math.isnan(none["p99_ttft_ms"])


def test_a_replay_and_a_simulation_of_the_same_requests_have_the_same_figures() -> None:
    """All figures that both reports have are equal if the requests ended alike."""
    timelines = [Timeline(0.0, (1.0, 1.04, 1.1)), Timeline(2.0, (2.5, 2.75)), Timeline(3.0, (3.5,))]
    simulated = [
        outcome(
            index, arrived_s=each.arrived_at, output_length=len(each.token_at), ttft_s=each.ttft_s,
            tbt_s=each.tbt_s or None, mean_gap_s=each.tpot_s or None, finished_s=each.token_at[-1],
        )
        for index, each in enumerate(timelines)
    ]  # fmt: skip
    replayed = [
        *(Outcome(status=200, error=None, timeline=each, prompt_tokens=100, cached_tokens=50) for each in timelines),
        Outcome(status=429, error="busy", timeline=None),
    ]
    sent = [RequestResult(lateness_s=0.0, ideal_cached_tokens=0, input_length=100, outcome=each) for each in replayed]
    report = build_report(sent, duration_s=10.0, ttft_slo_s=30.0, tbt_slo_s=0.1)
    figures = summary(result("same", *simulated, rejected(3, "busy")))
    shared = report.keys() & figures.keys() - {"errors"}
    assert {"mean_ttft_ms", "p90_tbt_ms", "p99_tpot_ms", "mean_e2el_ms", "hit_ratio"} < shared
    assert {name: figures[name] for name in shared} == {name: report[name] for name in shared}


def test_the_table_has_a_row_per_result_with_rejections_beside_latencies() -> None:
    lines = format_summary([result("four", *four()), result("none"), made_up("a\nname " * 9)]).splitlines()
    assert len(lines) == 4
    assert lines[0].split()[:4] == ["result", "requests", "rejected", "failed"]
    assert lines[1].split()[:7] == ["four", "4", "1", "1", "0.10", "25.0%", "12.5%"]
    assert lines[1].split()[7:] == ["20,500", "20,500", "36,100", "39,610", "50.0", "0.0"]
    assert lines[2].split()[7:12] == ["–"] * 5
    assert lines[3].startswith("a name a name")
    assert "…  " in lines[3]


def sent(outcome: Outcome, lateness_s: float = 0.0) -> RequestResult:
    return RequestResult(lateness_s=lateness_s, ideal_cached_tokens=4, input_length=10, outcome=outcome)


def success(*token_at: float) -> RequestResult:
    timeline = Timeline(1.0, token_at)
    return sent(Outcome(status=200, error=None, timeline=timeline, prompt_tokens=10, cached_tokens=2))


def test_timeline_figures() -> None:
    """TTFT, TPOT, gaps and TBT equal values calculated by hand; TBT is the mean of the longest tenth of the gaps."""
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
        "completed": 2, "rejected": 1, "failed": 1, "request_goodput": 0.5, "effective_fraction": 0.25,
        "hit_ratio": 0.2, "ideal_hit_ratio": 0.4, "p99_lateness_ms": 485,
    }  # fmt: skip
    assert {name: report[name] for name in expected} == pytest.approx(expected)
    assert report["errors"] == {"429: busy": 1, "0: gone": 1}
    table = format_report(report)
    assert "rejected 1" in table
    assert "ideal 40.0%" in table


def test_scripts_that_read_a_report_of_vllm_bench_serve_find_its_names() -> None:
    """The report has the names of vllm 0.31's JSON result that describe all requests together."""
    kinds, times = ("mean", "median", "std", "p99"), ("ttft", "tpot", "itl", "e2el")
    names = [f"{kind}_{name}_ms" for kind in kinds for name in times]
    names += ["num_prompts", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"]
    names += ["request_throughput", "request_goodput", "output_throughput", "total_token_throughput"]
    report = build_report([success(1.2, 1.4), success(1.4, 1.6)], duration_s=2.0, ttft_slo_s=1.0, tbt_slo_s=0.2)
    assert all(isinstance(report[name], int | float) for name in names)
    assert report["std_ttft_ms"] == pytest.approx(100)
