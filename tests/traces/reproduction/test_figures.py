"""Figures are pure: what their findings say follows from results made by hand, whatever simulated them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.traces.reports import made_up
from traces.format import TraceRecord
from traces.reproduction import figure_1, figure_5, overload
from traces.reproduction.command import FIGURES
from traces.reproduction.figure import CONVERSATION, Finding, Subject
from traces.reproduction.page import to_json
from traces.simulator.results import End, SimulationResult

RECORDS = [TraceRecord(arrived_s=float(n), input_length=1024, output_length=10, hash_ids=(0, n + 1)) for n in range(10)]
SUBJECT = Subject(name="conversation_trace.jsonl", kind=CONVERSATION, records=RECORDS)


def result(*, ttft_s: float = 1.0, num_slow: int = 0, num_rejected: int = 0) -> SimulationResult:
    """Ten requests: so many leading ones have long gaps, so many last ones were rejected."""
    outcomes = [
        made_up.outcome(n, ttft_s=ttft_s, tbt_s=1.0 if n < num_slow else 0.05) for n in range(10 - num_rejected)
    ]
    rejected = [made_up.rejected(n) for n in range(10 - num_rejected, 10)]
    return made_up.result("", *outcomes, *rejected, counters={"device_s": 10.0})


def ours(finding: Finding) -> dict[str, Any]:
    return {row.what: row.ours for row in finding.rows}


def test_names_of_figures_are_unique_and_runs_are_checked() -> None:
    """Every spec that a figure asks for can be simulated."""
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    for figure in FIGURES:
        for work in figure.runs(SUBJECT).values():
            work.check()


@pytest.mark.parametrize(
    ("even", "fewer", "order", "ratio"),
    [
        ((20, 5, 4, 3), (20, 5, 4, 3), True, True),
        ((20, 5, 4, 3), (20, 5, 4, 3.9), True, False),
        ((20, 5, 4, 3), (4, 5, 3, 2), False, True),
    ],
)
def test_figure_5_checks_the_order_and_the_last_ratio(
    even: Sequence[float], fewer: Sequence[float], order: bool, ratio: bool
) -> None:
    """Of both divisions the order, of the one with fewer prefill machines the ratio."""
    names = ("random", "load balance", "local cache-aware", "global cache-aware")
    ttfts = dict(zip(names, even, strict=True)) | {"moonserve": 1.0}
    ttfts |= {f"{name}, 6 + 10": ttft for name, ttft in zip(names, fewer, strict=True)}
    results = {name: result(ttft_s=ttfts[name]) for name in figure_5.runs(SUBJECT)}
    assert list(figure_5.FIGURE.finding(SUBJECT, results).claims.values()) == [order, ratio]


def test_figure_1_finds_the_speed_at_which_each_gain_is_the_published_one() -> None:
    """vLLM loses a request per step of speed beyond the first, at every limit alike; the pool loses none."""
    works = [(name, *name.rsplit(" ", 1)) for name in figure_1.runs(SUBJECT)]
    speeds = list(dict.fromkeys(float(speed) for _, _, speed in works))
    results = {
        name: result(num_slow=0 if system == "pool" else min(2 * speeds.index(float(speed)), 9))
        for name, system, speed in works
    }
    finding = figure_1.FIGURE.finding(SUBJECT, results)
    assert ours(finding)["gain over vLLM at 100 ms, speed 1"] == 0
    left, right = speeds[1], speeds[2]  # gains 0.25 and 0.667
    expected = left + (right - left) * (0.59 - 0.25) / (2 / 3 - 0.25)
    assert ours(finding)["speed at which the gain at 300 ms is the published one"] == pytest.approx(expected)
    assert all(finding.claims.values())


@pytest.mark.parametrize(
    ("counts", "holds"), [((5, 4, 3), [True, True]), ((5, 4, 4), [True, False]), ((4, 4, 3), [False, True])]
)
def test_overload_wants_fewer_rejections_at_each_step(counts: Sequence[int], holds: list[bool]) -> None:
    """Of the ways that look again; the other two only stand below."""
    counts = (*counts, 9, 8)
    results = {name: result(num_rejected=count) for name, count in zip(overload.runs(SUBJECT), counts, strict=True)}
    finding = overload.FIGURE.finding(SUBJECT, results)
    assert list(finding.claims.values())[:2] == holds
    shares = [share for what, share in ours(finding).items() if what.startswith("rejected")]
    assert shares == [count * 100 for count in counts]


def test_overload_tells_what_was_computed_for_nothing_and_rejected_at_the_handoff() -> None:
    results = {name: result(num_rejected=2) for name in overload.runs(SUBJECT)}
    baseline, wasteful = next(iter(results)), result(num_rejected=4)
    late = tuple(
        replace(each, reason="tbt_slo_at_handoff", prefill_s=2.0) if each.end is End.REJECTED else each
        for each in wasteful.outcomes
    )
    results[baseline] = replace(wasteful, outcomes=late, counters={"device_s": 16.0})
    rows = ours(overload.FIGURE.finding(SUBJECT, results))
    assert rows[f"at the handoff, {baseline}"] == 400.0
    assert rows[f"prefill time for nothing, {baseline}"] == 0.5
    assert rows[f"effective, {baseline}"] == 0.6


def test_infinite_gains_are_null_in_json() -> None:
    """vLLM may have no effective request at all; JSON has no infinity."""
    works = figure_1.runs(SUBJECT)
    results = {name: result(num_slow=0 if name.startswith("pool") else 10) for name in works}
    finding = figure_1.FIGURE.finding(SUBJECT, results)
    assert "null" in to_json(SUBJECT, [(figure_1.FIGURE, finding)], quick=False)
