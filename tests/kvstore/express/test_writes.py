"""Rights of this process's own writers over a real state: without an expiry, and ended by the process itself."""

from __future__ import annotations

import itertools

import pytest

from kvstore.express.storing import LocalWrites
from kvstore.mover import Mover
from kvstore.promises import Outcome, Reservation
from kvstore.stored import Wish
from protocol.errors import Overloaded
from tests.kvstore.nodes import key
from tests.kvstore.states import Heard, make_state

CAPACITY = 16 * 1024


def test_what_is_granted_becomes_visible_or_is_given_back_and_never_runs_out() -> None:
    state, clock = make_state(CAPACITY, Heard()), itertools.count()
    calls: list[str] = []
    refused = [Overloaded("draining", retry_after_s=1.0)]

    def admit() -> None:
        if refused:
            raise refused.pop()

    writes = LocalWrites(
        state,
        Mover(state, memoryview(bytearray(CAPACITY)), lambda: None),
        lambda: float(next(clock)),
        admit=admit,
        changed=lambda: calls.append("changed"),
        ended=lambda: calls.append("ended"),
    )

    def begun(*numbers: int) -> Reservation:
        reservation = writes.begin([Wish(key=key(n), parent=None, length=100) for n in numbers])
        assert reservation is not None
        assert state.expire(1e12) == []
        state.validate()
        return reservation

    with pytest.raises(Overloaded):
        begun(1)
    free = state.catalog.usage().free_bytes
    first, second = begun(1, 2), begun(1, 3)
    assert [slot.outcome for slot in second.slots] == [Outcome.IN_PROGRESS, Outcome.GRANTED]
    third = begun(2)
    writes.give_up(third)  # nothing was granted
    writes.give_up(second)
    writes.end(first, {key(1): 7, key(2): 7}, [key(2)])
    state.validate()
    assert state.catalog.present([key(n) for n in (1, 2, 3)]) == [True, False, False]
    assert state.catalog.usage().free_bytes == free - state.catalog.usage().held_bytes
    assert calls == ["changed"] * 3 + ["ended"] * 2
