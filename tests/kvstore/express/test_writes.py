"""Rights of this process's own writers over a real state, in any order of events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.express.storing import LocalWrites
from kvstore.mover import Mover
from kvstore.promises import Outcome, Reservation
from kvstore.stored import Wish
from protocol.errors import Overloaded
from protocol.keys import BlockKey
from tests.kvstore.nodes import key
from tests.kvstore.states import Heard, make_state
from tests.thoroughness import examples

CAPACITY = 16 * 1024
numbers = st.sets(st.integers(0, 9), min_size=1, max_size=4)


class Writers(RuleBasedStateMachine):
    """Several write at once; `stored` is what must be visible, as far as nothing was evicted for others."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard()
        self.state = make_state(CAPACITY, self.heard)
        self.calls: list[str] = []
        clock = itertools.count()
        self.writes = LocalWrites(
            self.state,
            Mover(self.state, memoryview(bytearray(CAPACITY)), lambda: None),
            lambda: float(next(clock)),
            admit=self.admit,
            changed=lambda: self.calls.append("changed"),
            ended=lambda: self.calls.append("ended"),
        )
        self.under_way: list[Reservation] = []
        self.draining = False

    def admit(self) -> None:
        if self.draining:
            raise Overloaded("draining", retry_after_s=1.0)

    @rule(which=numbers, length=st.integers(0, 5_000))
    def begin(self, which: set[int], length: int) -> None:
        wishes = [Wish(key=key(n), parent=None, length=length) for n in sorted(which)]
        if self.draining:
            with pytest.raises(Overloaded):
                self.writes.begin(wishes)
            return
        reservation = self.writes.begin(wishes)
        assert reservation is not None
        assert [slot.outcome is Outcome.GRANTED for slot in reservation.slots] == [
            wish.key in reservation.objects for wish in wishes
        ]
        if reservation.objects:
            self.under_way.append(reservation)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """What matched is visible with its checksum, the rest has never been."""
        reservation = self._one(data)
        keys = list(reservation.objects)
        corrupt = data.draw(st.sets(st.sampled_from(keys)))
        self.writes.end(reservation, dict.fromkeys(keys, 7), sorted(corrupt))
        assert self.calls[-1] == "ended"
        assert self._visible(keys) == [each not in corrupt for each in keys]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        reservation = self._one(data)
        free = self.state.catalog.usage().free
        self.writes.give_up(reservation)
        assert self.calls[-1] == "ended"
        assert self._visible(list(reservation.objects)) == [False] * len(reservation.objects)
        space = sum(stored.space for stored in reservation.objects.values())
        assert self.state.catalog.usage().free == free + space

    @rule()
    def drain(self) -> None:
        self.draining = not self.draining

    @rule()
    def long_after(self) -> None:
        """No right of this process's writers runs out."""
        assert self.state.expire(1e12) == []

    @invariant()
    def holds(self) -> None:
        self.state.validate()

    def _one(self, data: st.DataObject) -> Reservation:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        return self.under_way.pop(at)

    def _visible(self, keys: list[BlockKey]) -> list[bool]:
        return self.state.catalog.present(keys)


TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)


def test_giving_up_what_was_not_granted_changes_nothing() -> None:
    machine = Writers()
    wish = Wish(key=key(1), parent=None, length=100)
    first, second = machine.writes.begin([wish]), machine.writes.begin([wish])
    assert first is not None
    assert second is not None
    assert [slot.outcome for slot in second.slots] == [Outcome.IN_PROGRESS]
    machine.writes.give_up(second)
    machine.writes.end(first, {key(1): 7}, ())
    assert machine.state.catalog.present([key(1)]) == [True]
