"""How long calls may take."""

from __future__ import annotations

import pytest

from kvstore.client.deadline import PATIENCE, Deadline
from protocol.errors import DeadlineExceeded, InvalidRequest

HUNDRED_S = int(PATIENCE.slowest_bytes_s) * 100
"""So many bytes may take so long."""


@pytest.mark.parametrize(("timeout_s", "left_s", "allowed_s"), [(None, PATIENCE.base_s, 100), (50.0, 50.0, 0)])
def test_bytes_extend_only_a_time_that_the_caller_has_not_set(
    timeout_s: float | None, left_s: float, allowed_s: float
) -> None:
    """Once, also when an attempt that has half of it says so."""
    deadline = Deadline(timeout_s)
    attempt = deadline.half()
    assert deadline.left_s() == pytest.approx(left_s, abs=1.0)
    assert attempt.left_s() == pytest.approx(left_s / 2, abs=1.0)
    for nbytes in (HUNDRED_S, 1):
        attempt.allow(nbytes)
        assert attempt.left_s() == pytest.approx(left_s / 2 + allowed_s, abs=1.0)
        assert deadline.left_s() == pytest.approx(left_s + allowed_s, abs=1.0)


def test_what_is_over_is_over() -> None:
    deadline = Deadline(1e-9)
    with pytest.raises(DeadlineExceeded):
        deadline.left_s()
    assert not deadline.fair()
    assert Deadline(1.0).fair()
    for no_time in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest):
            Deadline(no_time)
