"""How long calls may take."""

from __future__ import annotations

import pytest

from kvstore.client.deadline import PATIENCE, Deadline
from protocol.errors import DeadlineExceeded, InvalidRequest


def test_without_a_time_limit_it_is_what_the_bytes_may_take() -> None:
    deadline = Deadline(None)
    assert deadline.left_s() == pytest.approx(PATIENCE.base_s, abs=1.0)
    deadline.allow(int(PATIENCE.slowest_bytes_s) * 100)
    assert deadline.left_s() == pytest.approx(PATIENCE.base_s + 100, abs=1.0)
    deadline.allow(1)
    assert deadline.left_s() == pytest.approx(PATIENCE.base_s + 100, abs=1.0)


def test_a_time_limit_is_not_extended() -> None:
    deadline = Deadline(50.0)
    deadline.allow(10**12)
    assert deadline.left_s() == pytest.approx(50.0, abs=1.0)


def test_an_attempt_leaves_half_and_what_it_allows_is_allowed() -> None:
    deadline = Deadline(None)
    attempt = deadline.half()
    assert attempt.left_s() == pytest.approx(PATIENCE.base_s / 2, abs=1.0)
    attempt.allow(int(PATIENCE.slowest_bytes_s) * 100)
    assert attempt.left_s() == pytest.approx(PATIENCE.base_s / 2 + 100, abs=1.0)
    assert deadline.left_s() == pytest.approx(PATIENCE.base_s + 100, abs=1.0)


def test_what_is_over_is_over() -> None:
    deadline = Deadline(1e-9)
    with pytest.raises(DeadlineExceeded):
        deadline.left_s()
    assert not deadline.fair()
    assert Deadline(1.0).fair()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_no_time_is_no_time_limit(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest):
        Deadline(timeout_s)
