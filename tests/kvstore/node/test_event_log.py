"""The event log: followers of a node get all events in order, or are notified that they have missed some."""

from contextlib import aclosing

import pytest

from moonserve.kvstore.node.event_log import KEPT_EVENTS, Event, EventLog, message_of, subscription_messages
from moonserve.kvstore.state.objects import Tier
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, pack_keys
from moonserve.protocol.membership.heartbeats import BlockLog
from moonserve.protocol.pb import kvstore_pb2
from tests.kvstore.state.states import make_state
from tests.kvstore.state.tiered import chain, key, keys

EPOCH = 3


def names(events: list[Event]) -> list[int]:
    return [int.from_bytes(event.key, "little") for event in events]


def note(log: EventLog, *numbers: int) -> None:
    for number in numbers:
        log.added(key(number), None, Tier.MEMORY)


def test_each_subscriber_is_woken_and_gets_all_events_and_reads_after_its_position() -> None:
    log = EventLog()
    note(log, 7)  # without followers the event is not kept
    assert [log.needs_snapshot(log.subscribe(seq)) for seq in (0, 1, 2, 3)] == [True, True, False, True]
    first = log.subscribe(2)
    woken: list[int] = []
    first.wake = lambda: woken.append(log.next_seq)
    note(log, 1, 2)
    second = log.subscribe(4)
    note(log, 3)
    assert (names(log.next_events(first, 2)), names(log.next_events(first, 9))) == ([1, 2], [3])
    assert names(log.next_events(second, 9)) == [3]
    assert log.next_events(first, 9) == []
    assert woken == [3, 4, 5]
    log.report_reads(pack_keys(keys(1, 2)))
    assert [log.take_reads(each) for each in (first, second)] == 2 * [pack_keys(keys(1, 2))]
    assert log.take_reads(first) == b""


def test_a_node_announces_added_and_removed_blocks_to_the_conductor() -> None:
    told, changes = BlockLog(list), list[None]()
    told.on_change = lambda: changes.append(None)
    log = EventLog(told)
    log.added(key(2), key(1), Tier.MEMORY)
    log.moved(key(2), Tier.DISK)
    log.removed(key(2))
    assert len(changes) == 2
    assert told.changes().added_keys == key(2)


def test_a_subscriber_too_far_behind_learns_that_it_missed_events() -> None:
    log = EventLog()
    follower = log.subscribe(1)
    note(log, *range(KEPT_EVENTS))
    assert not log.needs_snapshot(follower)
    note(log, 0)
    assert log.needs_snapshot(follower)
    with pytest.raises(AssertionError):
        log.next_events(follower, 1)


def test_reads_of_a_follower_that_does_not_listen_are_bounded() -> None:
    log = EventLog()
    follower = log.subscribe(1)
    for _ in range(2):
        log.report_reads(key(1) * (KEPT_EVENTS - 1))
    assert len(log.take_reads(follower)) == KEPT_EVENTS * KEY_BYTES


async def test_a_new_follower_gets_an_inventory_and_then_the_log() -> None:
    log, wishes = EventLog(), chain(1, 2, 3)
    state = make_state(4 * 256 * len(wishes), log)
    state.reservations.reserve("r", wishes, 30.0, 0.0)
    state.reservations.commit("r", {wish.key: 7 for wish in wishes}, 0.0)
    state.reservations.verified("r", [], 0.0)
    request = kvstore_pb2.StoreSubscribeRequest(epoch=EPOCH)
    async with aclosing(subscription_messages(log, state, EPOCH, request)) as messages:  # type: ignore[type-var]
        snapshot, changes = await anext(messages), await anext(messages)
    assert (snapshot.snapshot, snapshot.more, snapshot.next_seq) == (True, False, 4)
    assert snapshot.added_keys == b"".join(keys(1, 2, 3))
    assert snapshot.added_parents == b"".join([NO_PARENT, *keys(1, 2)])
    assert (changes.snapshot, changes.first_seq, changes.next_seq) == (False, 4, 4)


async def test_an_inventory_overtaken_by_the_log_is_followed_by_another() -> None:
    log = EventLog()
    request = kvstore_pb2.StoreSubscribeRequest()
    async with aclosing(subscription_messages(log, make_state(256, log), EPOCH, request)) as messages:  # type: ignore[type-var]
        note(log, 99)  # makes the first inventory due
        first = await anext(messages)
        note(log, *range(KEPT_EVENTS + 1))
        second = await anext(messages)
    assert (first.snapshot, first.next_seq) == (True, 2)
    assert (second.snapshot, second.next_seq) == (True, KEPT_EVENTS + 3)


def test_a_message_holds_the_last_event_of_each_key() -> None:
    """A message has only each key's last event: an object that was added again does not keep its earlier parent."""
    events = [Event(key(1), key(9)), Event(key(2)), Event(key(2), left=True)]
    events += [Event(key(3), key(9)), Event(key(3), left=True), Event(key(3))]
    message = message_of(EPOCH, 1, events, snapshot=False, more=False)
    assert message.added_keys == pack_keys(keys(1, 3))
    assert message.added_parents == pack_keys([key(9), NO_PARENT])
    assert message.removed_keys == key(2)
