"""Arrivals, popularity and sessions are told as they are."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.traces.analysis.small import records_of, trees
from traces.analysis.measures import describe_arrivals, describe_sessions, turns_of
from traces.analysis.prefixes import prefix_tree
from traces.analysis.statistics import analyze
from traces.analysis.tables import format_statistics


def test_a_steady_trace_has_one_rate_and_no_burstiness() -> None:
    arrivals = describe_arrivals([index * 0.5 for index in range(241)], window_s=10)
    assert arrivals["mean_rate"] == pytest.approx(2)
    assert arrivals["rates"] == [2.0] * 12
    assert arrivals["gap_cv"] == pytest.approx(0)
    assert arrivals["dispersion"]["10s"] == pytest.approx(0)
    assert arrivals["peak_to_mean"] == pytest.approx(1)


def test_batches_are_bursty() -> None:
    arrivals = describe_arrivals([index // 10 * 10.0 for index in range(1000)], window_s=60)
    assert arrivals["gap_cv"] == pytest.approx(3, abs=0.1)
    assert arrivals["dispersion"]["1s"] == pytest.approx(9, abs=0.1)


def test_turns_extend_a_prompt_and_users_of_one_system_prompt_are_strangers() -> None:
    first, second = [0, 0, 5], [0, 1, 5]
    records = records_of([first, second, [*first, 6], [0, 2], [*second, 7], [*first, 6, 8]], gap_s=2)
    turns, num_sessions = turns_of(prefix_tree(records), records)
    assert num_sessions == 3
    assert [(turn.session, turn.gap_s, turn.new_tokens) for turn in turns] == [
        (0, 4, 512), (1, 6, 512), (0, 6, 512),
    ]  # fmt: skip
    figures = describe_sessions(prefix_tree(records), records)
    assert figures["extending_share"] == 0.5
    assert figures["turns"]["max"] == 3


@given(trees())
def test_every_request_belongs_to_one_session(paths: list[list[int]]) -> None:
    records = records_of(paths, short=100)
    turns, num_sessions = turns_of(prefix_tree(records), records)
    assert len(turns) + num_sessions == len(records)
    assert all(turn.gap_s > 0 for turn in turns)


def test_one_request_is_a_trace() -> None:
    statistics = analyze(records_of([[0, 0]]))
    assert statistics["arrivals"]["mean_rate"] is None
    assert statistics["arrivals"]["dispersion"] == {"1s": None, "10s": None, "60s": None}
    assert "requests               1" in format_statistics(statistics, "one.jsonl")
