"""Rights on objects: what is granted, what is refused, and that nothing is lost or shared, in any order of events."""

from __future__ import annotations

import pytest

from kvstore.allocator import ALIGNMENT
from kvstore.promises import Outcome, Phase
from kvstore.state import StoreState
from kvstore.stored import Watermarks, Wish
from protocol.errors import StaleLease
from protocol.keys import BlockKey
from tests.kvstore.states import NO_TRIM, Heard, make_state

TTL_S = 30.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def chain(*numbers: int, length: int = ALIGNMENT) -> list[Wish]:
    """Wishes for the blocks `numbers`, each the parent of the next."""
    parents = [None, *map(key, numbers)]
    return [
        Wish(key=key(n), parent=parent, length=length)
        for n, parent in zip(numbers, parents, strict=False)
    ]


def make(units: int = 4, watermarks: Watermarks = NO_TRIM) -> tuple[StoreState, Heard]:
    heard = Heard()
    return make_state(units * ALIGNMENT, heard, watermarks=watermarks), heard


def store(state: StoreState, wishes: list[Wish], now: float = 0.0, name: str = "") -> list[Outcome]:
    """Reserves and commits `wishes`; their checksums are their keys' numbers."""
    reservation_id = name or f"put-{[wish.key for wish in wishes]}-{now}"
    reservation = state.writers.reserve(reservation_id, wishes, TTL_S, now)
    if reservation.objects:
        checksums = {k: int.from_bytes(k, "little") for k in reservation.objects}
        assert state.writers.commit(reservation_id, checksums, now) is None
        state.writers.verified(reservation_id, [], now)
    return [slot.outcome for slot in reservation.slots]


def test_an_object_is_visible_only_after_its_commit_was_verified() -> None:
    state, heard = make()
    state.writers.reserve("r", chain(1, 2), TTL_S, 0.0)
    assert state.catalog.present([key(1), key(2)]) == [False, False]
    assert state.writers.commit("r", {key(1): 11, key(2): 22}, 1.0) is None
    assert state.catalog.present([key(1)]) == [False]
    assert [item.checksum for item in state.writers.landed("r")[1]] == [11, 22]
    state.writers.verified("r", [], 1.0)
    assert heard.present == {key(1): None, key(2): key(1)}
    lease = state.readers.lease("l", [key(1), key(2), key(3)], 10.0, 1.0)
    assert [stored.checksum for stored in lease.objects] == [11, 22]
    state.validate()


def test_keys_left_out_of_the_commit_are_dropped() -> None:
    state, heard = make()
    state.writers.reserve("r", chain(1, 2), TTL_S, 0.0)
    state.writers.commit("r", {key(1): 1}, 0.0)
    state.writers.verified("r", [], 0.0)
    assert list(heard.present) == [key(1)]
    assert state.catalog.usage().reserved == 0
    state.validate()


def test_reserving_again_with_the_same_id_gives_the_same_slots() -> None:
    state, _ = make()
    first = state.writers.reserve("r", chain(1, 2), TTL_S, 0.0)
    assert state.writers.reserve("r", chain(1, 2), TTL_S, 5.0) is first
    with pytest.raises(StaleLease):
        state.writers.reserve("r", chain(3), TTL_S, 5.0)
    state.validate()


def test_what_is_present_or_being_written_is_not_granted_twice() -> None:
    state, _ = make()
    store(state, chain(1))
    state.writers.reserve("other", chain(2), TTL_S, 0.0)
    slots = state.writers.reserve("r", [*chain(1, 2, 3), *chain(3)], TTL_S, 0.0).slots
    assert [slot.outcome for slot in slots] == [
        Outcome.PRESENT,
        Outcome.IN_PROGRESS,
        Outcome.GRANTED,
        Outcome.IN_PROGRESS,
    ]
    state.validate()


def test_a_commit_at_or_after_expiry_is_refused_even_before_the_timer_fired() -> None:
    state, _ = make()
    state.writers.reserve("r", chain(1), TTL_S, 0.0)
    with pytest.raises(StaleLease):
        state.writers.commit("r", {key(1): 1}, TTL_S)
    assert [r.reservation_id for r in state.expire(TTL_S)] == ["r"]
    with pytest.raises(StaleLease):
        state.writers.commit("r", {key(1): 1}, TTL_S)
    state.validate()


def test_expired_space_is_reclaimed_only_once_its_window_is_closed() -> None:
    state, _ = make(units=1)
    state.writers.reserve("r", chain(1), TTL_S, 0.0)
    assert state.next_deadline() == TTL_S
    assert state.expire(TTL_S - 0.1) == []
    [reservation] = state.expire(TTL_S)
    assert reservation.phase is Phase.CLOSING
    assert store(state, chain(2), TTL_S) == [Outcome.FULL]
    state.writers.closed("r", TTL_S)
    assert store(state, chain(2), TTL_S + 1) == [Outcome.GRANTED]
    assert state.counters["reservations_expired"] == 1
    state.validate()


def test_a_commit_of_foreign_keys_is_refused_and_the_reservation_lives_on() -> None:
    state, _ = make()
    state.writers.reserve("r", chain(1), TTL_S, 0.0)
    with pytest.raises(StaleLease):
        state.writers.commit("r", {key(1): 1, key(9): 9}, 0.0)
    assert state.writers.commit("r", {key(1): 1}, 0.0) is None
    state.writers.verified("r", [], 0.0)
    state.validate()


def test_an_abort_that_overtakes_its_reserve_wins() -> None:
    state, _ = make()
    assert state.writers.abort("r", 0.0) is None
    with pytest.raises(StaleLease):
        state.writers.reserve("r", chain(1), TTL_S, 0.1)
    state.validate()


@pytest.mark.parametrize("first", ["r0", ""])
def test_the_end_of_an_id_is_remembered_for_a_while_only(first: str) -> None:
    state, _ = make()
    state.writers.abort(first, 0.0)
    for number in range(1, 100):
        state.writers.abort(f"r{number}", float(number))
    assert state.writers.reserve(first, chain(1), TTL_S, 100.0).objects
    with pytest.raises(StaleLease):
        state.writers.reserve("r99", chain(2), TTL_S, 100.0)
    state.validate()


def test_a_lease_covers_the_longest_leading_run() -> None:
    state, _ = make()
    store(state, chain(1, 2))
    store(state, chain(4))
    lease = state.readers.lease("l", [key(1), key(2), key(3), key(4)], 10.0, 0.0)
    assert [stored.key for stored in lease.objects] == [key(1), key(2)]
    assert state.catalog.usage().leased == 2 * ALIGNMENT
    assert state.readers.lease("l", [key(1)], 10.0, 1.0) is lease
    state.validate()


def test_an_expired_lease_is_refused_and_never_revived() -> None:
    state, _ = make()
    store(state, chain(1))
    state.readers.lease("l", [key(1)], 10.0, 0.0)
    state.readers.renew("l", 10.0, 9.0)
    assert state.next_deadline() == 19.0
    with pytest.raises(StaleLease):
        state.readers.renew("l", 10.0, 19.0)
    assert state.catalog.usage().leased == ALIGNMENT
    state.expire(19.0)
    assert state.catalog.usage().leased == 0
    for attempt in (
        lambda: state.readers.renew("l", 1.0, 20.0),
        lambda: state.readers.lease("l", [], 1.0, 20.0),
    ):
        with pytest.raises(StaleLease):
            attempt()
    assert state.counters["leases_expired"] == 1
    state.validate()


def test_a_release_that_overtakes_its_lease_wins() -> None:
    state, _ = make()
    store(state, chain(1))
    state.readers.release("l", 0.0)
    with pytest.raises(StaleLease):
        state.readers.lease("l", [key(1)], 10.0, 0.1)
    state.validate()


def test_the_leaf_goes_first_even_when_its_parent_is_older() -> None:
    state, heard = make(units=4)
    store(state, chain(1, 2, 3))
    store(state, chain(4))
    state.readers.lease("l", [key(1), key(2), key(3)], 10.0, 0.0)  # now 4 is the oldest
    state.readers.release("l", 0.0)
    store(state, chain(5))
    assert list(heard.present) == [key(1), key(2), key(3), key(5)]
    store(state, chain(6))
    assert list(heard.present) == [key(1), key(2), key(5), key(6)]
    state.validate()


def test_making_room_for_a_tail_does_not_evict_its_own_head() -> None:
    state, heard = make(units=2)
    store(state, chain(1))
    store(state, chain(9))
    outcomes = store(state, chain(1, 2))
    assert outcomes == [Outcome.PRESENT, Outcome.GRANTED]
    assert list(heard.present) == [key(1), key(2)]
    state.validate()


def test_a_chain_longer_than_the_store_keeps_its_head() -> None:
    state, heard = make(units=2)
    store(state, chain(9))
    outcomes = store(state, chain(1, 2, 3, 4))
    assert outcomes == [Outcome.GRANTED, Outcome.GRANTED, Outcome.FULL, Outcome.FULL]
    assert list(heard.present) == [key(1), key(2)]
    state.validate()


def test_leased_objects_are_not_evicted() -> None:
    state, heard = make(units=2)
    store(state, chain(1))
    store(state, chain(2))
    state.readers.lease("l", [key(1)], 10.0, 0.0)
    store(state, chain(3))
    assert list(heard.present) == [key(1), key(3)]
    state.readers.lease("m", [key(3)], 10.0, 0.0)
    assert store(state, chain(4)) == [Outcome.FULL]
    state.validate()


def test_a_wish_that_eviction_cannot_help_evicts_nothing() -> None:
    state, heard = make(units=4)
    store(state, chain(1))
    store(state, chain(2))
    state.readers.lease("l", [key(1)], 10.0, 0.0)
    assert store(state, chain(3, length=4 * ALIGNMENT)) == [Outcome.FULL]
    assert list(heard.present) == [key(1), key(2)]
    state.validate()


def test_above_the_watermark_a_share_is_evicted_ahead() -> None:
    state, heard = make(units=100, watermarks=Watermarks())
    for number in range(1, 91):
        store(state, chain(number))
    assert len(heard.present) == 90
    store(state, chain(91))
    assert len(heard.present) == 85
    assert min(heard.present) == key(7)
    state.validate()
