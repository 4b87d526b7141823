"""What the drawings are drawn from, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.reports.made_up import outcome, rejected, result
from traces.reports.distributions import MAX_POINTS, cumulative
from traces.reports.loads import MAX_COLUMNS, column_length_s, kinds_of, table_of
from traces.reports.numbers import milliseconds, scaled, seconds, tick
from traces.reports.over_time import OTHER, rejections
from traces.reports.picture import subjects_of
from traces.reports.predictions import near_share, pairs_of
from traces.reports.time_axis import bin_length_s, time_axis
from traces.simulator.results import InstanceSample, SimulationResult


def sample(at_s: float, instance_id: str, queued: int, predicted: float = 0.0) -> InstanceSample:
    return InstanceSample(
        at_s=at_s, instance_id=instance_id, queued=queued, running=1, context_tokens=0,
        predicted_queue_s=predicted,
    )  # fmt: skip


def test_a_curve_ends_below_the_whole_by_what_was_rejected() -> None:
    x, y = cumulative(np.array([1.0, 3.0]), 4)
    assert x.tolist() == [1, 1, 3]
    assert y.tolist() == [0, 0.25, 0.5]


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    x, y = cumulative(np.arange(10_000.0), 20_000)
    assert len(x) == MAX_POINTS + 1
    assert (x[0], x[-1], y[-1]) == (0, 9_999, 0.5)
    assert x[1:] == pytest.approx(y[1:] * 20_000 - 1)


def test_loads_are_means_of_stretches_and_unknown_where_nothing_was_sampled() -> None:
    samples = [
        sample(0.0, "d-0", 3), sample(1.0, "d-0", 5), sample(1.5, "d-0", 0), sample(4.0, "d-0", 1),
        sample(1.0, "d-1", 2, predicted=7.5), sample(2.0, "e-0", 9),
    ]  # fmt: skip
    table = table_of(samples, ["d-0", "d-1"], in_seconds=False, end_s=4.0, length_s=1.0)
    assert table[0].tolist() == pytest.approx([4, 3.5, math.nan, 2], nan_ok=True)
    assert table[1].tolist() == pytest.approx([math.nan, 3, math.nan, math.nan], nan_ok=True)
    assert table_of(samples, ["d-1"], in_seconds=True, end_s=4.0, length_s=1.0)[0][1] == 7.5


@given(st.integers(1, 1000), st.floats(0.01, 100), st.floats(0.001, 1))
def test_regular_samples_leave_no_column_empty(num: int, interval_s: float, rest: float) -> None:
    """However the end falls between two samples."""
    samples = [sample(index * interval_s, "d-0", 1) for index in range(num)]
    end_s = (num - 1 + rest) * interval_s
    length_s = column_length_s(samples, end_s)
    table = table_of(samples, ["d-0"], in_seconds=False, end_s=end_s, length_s=length_s)
    assert table.shape[1] <= MAX_COLUMNS
    assert np.all(table == 2)


def test_instances_are_grouped_by_kind_and_ordered_by_number() -> None:
    names = ["prefill-10", "prefill-2", "decode-0", "7", "vllm"]
    assert kinds_of([sample(0.0, name, 0) for name in names]) == {
        "prefill": ["prefill-2", "prefill-10"], "decode": ["decode-0"], "instances": ["7"],
        "vllm": ["vllm"],
    }  # fmt: skip


def test_predictions_count_where_both_are_known() -> None:
    known = [
        outcome(0, ttft_s=2.0, predicted_ttft_s=2.5), outcome(1, ttft_s=2.0, predicted_ttft_s=1.4),
    ]  # fmt: skip
    unknown = [
        rejected(2, predicted_ttft_s=9.0), outcome(3, predicted_ttft_s=0.0),
        outcome(4, predicted_ttft_s=math.inf),
    ]  # fmt: skip
    pairs = pairs_of(result("p", *known, *unknown))
    assert pairs.tolist() == [[2.0, 2.5], [2.0, 1.4]]
    assert near_share(pairs) == 0.5


def many_reasons() -> SimulationResult:
    """Twelve reasons, the first the most frequent."""
    return result(
        "many", *(rejected(i, f"r{i % 12:02}", arrived_s=i / 10) for i in range(90)), duration_s=9.0
    )


def test_the_rarest_of_many_reasons_are_one() -> None:
    section = rejections(subjects_of([many_reasons()]))
    labels = [key.label for key in section.legend]
    assert labels[0] == "rejected: r00"
    assert labels[-1] == OTHER
    assert len(labels) == 8
    assert [picture.note for picture in section.pictures] == ["90 in all"]


def test_time_has_the_unit_that_suits_the_longest_result() -> None:
    def unit(end_s: float) -> str:
        return time_axis(subjects_of([result("r", duration_s=end_s), result("s")])).unit

    assert [unit(each) for each in (0.0, 299, 300, 14_399, 14_400, 345_600)] == [
        "s", "s", "min", "min", "h", "d",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("end_s", "length_s"), [(1, 1), (60, 1), (61, 2), (3600, 60), (3601, 120), (1e9, 1e9 / 60)]
)
def test_bins_have_round_lengths(end_s: float, length_s: float) -> None:
    assert bin_length_s(end_s, 60) == length_s


def test_numbers_are_written_for_people() -> None:
    assert [tick(v) for v in (0, 0.05, 30, 1500, 3e6, -2000)] == [
        "0",
        "0.05",
        "30",
        "1.5k",
        "3M",
        "-2k",
    ]
    assert [scaled(v) for v in (0, 0.25, 99_999, 1.7e13, math.inf)] == [
        "0", "0.25", "99,999", "17 T", "–",
    ]  # fmt: skip
    assert [milliseconds(v) for v in (1.25, 1234.5, math.nan)] == ["1.2", "1,234", "–"]
    assert [seconds(v) for v in (5, 12_345, math.nan)] == ["0.005", "12.35", "–"]
