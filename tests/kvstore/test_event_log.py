"""What followers of a node are told: all of it, in order, or that they have missed some."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.event_log import KEPT_EVENTS, Event, EventLog, follow
from kvstore.stored import Tier
from protocol.keys import KEY_BYTES, NO_PARENT, BlockKey, pack_keys
from protocol.membership import BlockLog
from protocol.pb import kvstore_pb2
from tests.kvstore.states import make_state
from tests.kvstore.tiered import chain, key, keys

EPOCH = 3


def names(events: list[Event]) -> list[int]:
    return [int.from_bytes(event.key, "little") for event in events]


def note(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        log.added(key(number), None, Tier.MEMORY)


def test_each_follower_gets_all_events_and_reads_after_its_place_and_is_woken() -> None:
    log = EventLog()
    note(log, 7)  # nobody follows, so nobody can have it later
    assert [log.missed(log.follow(seq)) for seq in (0, 1, 2, 3)] == [True, True, False, True]
    first = log.follow(2)
    woken: list[int] = []
    first.wake = lambda: woken.append(log.next_seq)
    note(log, 1, 2)
    second = log.follow(4)
    note(log, 3)
    assert (names(log.take(first, 2)), names(log.take(first, 9))) == ([1, 2], [3])
    assert names(log.take(second, 9)) == [3]
    assert log.take(first, 9) == []
    assert woken == [3, 4, 5]
    log.read(pack_keys(keys(1, 2)))
    assert [log.take_reads(each) for each in (first, second)] == 2 * [pack_keys(keys(1, 2))]
    assert log.take_reads(first) == b""


def test_a_conductor_is_told_what_comes_and_goes() -> None:
    told, changes = BlockLog(list), list[None]()
    told.on_change = lambda: changes.append(None)
    log = EventLog(told)
    log.added(key(2), key(1), Tier.MEMORY)
    log.moved(key(2), Tier.DISK)
    log.removed(key(2))
    assert len(changes) == 2
    assert told.changes().added_keys == key(2)


def test_a_follower_too_far_behind_has_missed_events_and_is_never_given_others_for_them() -> None:
    log = EventLog()
    follower = log.follow(1)
    note(log, *range(KEPT_EVENTS))
    assert not log.missed(follower)
    note(log, 0)
    assert log.missed(follower)
    with pytest.raises(AssertionError):
        log.take(follower, 1)


def test_reads_of_a_follower_that_does_not_listen_are_bounded() -> None:
    log = EventLog()
    follower = log.follow(1)
    for _ in range(2):
        log.read(key(1) * (KEPT_EVENTS - 1))
    assert len(log.take_reads(follower)) == KEPT_EVENTS * KEY_BYTES


async def messages(log: EventLog, num_objects: int, next_seq: int, count: int) -> list[kvstore_pb2.StoreEvents]:
    """The first messages to a follower of a node with so many objects."""
    state = make_state(4 * 256 * max(num_objects, 1), log)
    wishes = chain(*range(1, num_objects + 1))
    state.writers.reserve("r", wishes, 30.0, 0.0)
    state.writers.commit("r", {wish.key: 7 for wish in wishes}, 0.0)
    state.writers.verified("r", [], 0.0)
    request = kvstore_pb2.StoreSubscribeRequest(epoch=EPOCH, next_seq=next_seq)
    received: list[kvstore_pb2.StoreEvents] = []
    subscription = follow(log, state, EPOCH, request)
    async for message in subscription:
        received.append(message)
        if len(received) == count:
            break
    await subscription.aclose()  # type: ignore[attr-defined]  # an async generator, declared as an iterator
    return received


async def test_a_new_follower_gets_an_inventory_and_then_the_log() -> None:
    snapshot, changes = await messages(EventLog(), 3, 0, 2)
    assert (snapshot.snapshot, snapshot.more, snapshot.next_seq) == (True, False, 4)
    assert snapshot.added_keys == b"".join(keys(1, 2, 3))
    assert snapshot.added_parents == b"".join([NO_PARENT, *keys(1, 2)])
    assert (changes.snapshot, changes.first_seq, changes.next_seq) == (False, 4, 4)


async def test_an_inventory_that_the_log_outran_is_followed_by_another() -> None:
    log = EventLog()
    state = make_state(256, log)
    subscription = follow(log, state, EPOCH, kvstore_pb2.StoreSubscribeRequest())
    note(log, 99)  # so that the first inventory is due
    first = await anext(subscription)
    assert (first.snapshot, first.next_seq) == (True, 2)
    note(log, *range(KEPT_EVENTS + 1))
    second = await anext(subscription)
    assert (second.snapshot, second.next_seq) == (True, KEPT_EVENTS + 3)
    await subscription.aclose()  # type: ignore[attr-defined]  # an async generator, declared as an iterator


async def changes_of(told: Callable[[EventLog], None]) -> kvstore_pb2.StoreEvents:
    """One message with all that was told to a log."""
    log = EventLog()
    log.follow(1)  # keeps what is told
    told(log)
    request = kvstore_pb2.StoreSubscribeRequest(epoch=EPOCH, next_seq=1)
    subscription = follow(log, make_state(256, EventLog()), EPOCH, request)
    message = await anext(subscription)
    await subscription.aclose()  # type: ignore[attr-defined]  # an async generator, declared as an iterator
    return message


async def test_the_last_event_of_a_key_says_what_is_so() -> None:
    def told(log: EventLog) -> None:
        log.added(key(1), key(9), Tier.MEMORY)
        log.added(key(2), None, Tier.MEMORY)
        log.moved(key(1), Tier.DISK)
        log.removed(key(2))

    message = await changes_of(told)
    assert message.added_keys == key(1)
    assert message.added_parents == key(9)
    assert message.removed_keys == key(2)


async def test_an_object_that_came_again_does_not_inherit_the_parent_it_had() -> None:
    def told(log: EventLog) -> None:
        log.added(key(1), key(9), Tier.MEMORY)
        log.removed(key(1))
        log.added(key(1), None, Tier.MEMORY)

    message = await changes_of(told)
    assert BlockKey(message.added_parents) == NO_PARENT
