"""What comes between a decision and its landing is learned by how far ahead was looked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.overtaking import Overtaking


def test_nothing_is_expected_until_something_came() -> None:
    assert Overtaking().expected(3.0) == 0.0


def test_what_came_is_expected_of_leads_alike_and_of_no_others() -> None:
    overtaking = Overtaking()
    for surplus in (4.0, 6.0):
        overtaking.observe(3.0, surplus)
    assert overtaking.expected(2.5) == pytest.approx(5.0)
    assert overtaking.expected(0.2) == 0.0
    assert overtaking.expected(50.0) == 0.0


def test_fewer_than_foreseen_are_not_expected_to_be_less_than_none() -> None:
    overtaking = Overtaking()
    overtaking.observe(1.0, -3.0)
    assert overtaking.expected(1.0) == 0.0
    overtaking.validate()


def test_the_newest_fifty_or_so_count() -> None:
    overtaking = Overtaking()
    for _ in range(1000):
        overtaking.observe(1.0, 0.0)
    for _ in range(200):
        overtaking.observe(1.0, 10.0)
    assert overtaking.expected(1.0) == pytest.approx(10.0, rel=0.03)


@pytest.mark.parametrize("lead_s", [0.0, 1e-9, 1e9])
def test_leads_of_any_length_are_taken(lead_s: float) -> None:
    overtaking = Overtaking()
    overtaking.observe(lead_s, 2.0)
    assert overtaking.expected(lead_s) == 2.0


def test_deviations_are_those_of_what_came_at_that_lead() -> None:
    overtaking = Overtaking()
    for _ in range(500):
        for surplus in (2.0, 10.0):
            overtaking.observe(4.0, surplus)
    assert overtaking.expected(4.0) == pytest.approx(6.0, abs=0.1)
    assert overtaking.expected(4.0, 1.0) == pytest.approx(10.0, abs=0.2)
    assert overtaking.expected(0.5, 1.0) == 0.0
    overtaking.validate()


def test_one_case_alone_deviates_from_nothing() -> None:
    overtaking = Overtaking()
    overtaking.observe(1.0, 7.0)
    assert overtaking.expected(1.0, 3.0) == 7.0


@given(seen=st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(-1e6, 1e6)), max_size=60))
def test_whatever_is_observed_caution_never_expects_fewer(
    seen: list[tuple[float, float]],
) -> None:
    overtaking = Overtaking()
    for lead_s, surplus in seen:
        overtaking.observe(lead_s, surplus)
        overtaking.validate()
        assert 0.0 <= overtaking.expected(lead_s) <= overtaking.expected(lead_s, 1.0)
