"""The event log: followers of a node get all events in order, or are notified that they have missed some."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from kvstore.event_log import KEPT_EVENTS, Event, EventLog, follow, message_of
from kvstore.stored import Tier
from protocol.keys import KEY_BYTES, NO_PARENT, pack_keys
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
    note(log, 7)  # without followers the event is not kept
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


async def test_a_new_follower_gets_an_inventory_and_then_the_log() -> None:
    log, wishes = EventLog(), chain(1, 2, 3)
    state = make_state(4 * 256 * len(wishes), log)
    state.writers.reserve("r", wishes, 30.0, 0.0)
    state.writers.commit("r", {wish.key: 7 for wish in wishes}, 0.0)
    state.writers.verified("r", [], 0.0)
    request = kvstore_pb2.StoreSubscribeRequest(epoch=EPOCH)
    async with aclosing(follow(log, state, EPOCH, request)) as messages:  # type: ignore[type-var]
        snapshot, changes = await anext(messages), await anext(messages)
    assert (snapshot.snapshot, snapshot.more, snapshot.next_seq) == (True, False, 4)
    assert snapshot.added_keys == b"".join(keys(1, 2, 3))
    assert snapshot.added_parents == b"".join([NO_PARENT, *keys(1, 2)])
    assert (changes.snapshot, changes.first_seq, changes.next_seq) == (False, 4, 4)


async def test_an_inventory_that_the_log_outran_is_followed_by_another() -> None:
    log = EventLog()
    request = kvstore_pb2.StoreSubscribeRequest()
    async with aclosing(follow(log, make_state(256, log), EPOCH, request)) as messages:  # type: ignore[type-var]
        note(log, 99)  # makes the first inventory due
        first = await anext(messages)
        note(log, *range(KEPT_EVENTS + 1))
        second = await anext(messages)
    assert (first.snapshot, first.next_seq) == (True, 2)
    assert (second.snapshot, second.next_seq) == (True, KEPT_EVENTS + 3)


def test_a_message_says_of_each_key_what_its_last_event_says() -> None:
    """A message has only each key's last event: an object that was added again does not keep its earlier parent."""
    events = [Event(key(1), key(9)), Event(key(2)), Event(key(2), left=True)]
    events += [Event(key(3), key(9)), Event(key(3), left=True), Event(key(3))]
    message = message_of(EPOCH, 1, events, snapshot=False, more=False)
    assert message.added_keys == pack_keys(keys(1, 3))
    assert message.added_parents == pack_keys([key(9), NO_PARENT])
    assert message.removed_keys == key(2)
