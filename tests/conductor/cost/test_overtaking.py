"""What comes between a decision and its landing is learned by how far ahead was looked."""

from __future__ import annotations

import pytest

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
