"""Tests of block events in heartbeats: lost and repeated messages leave the right blocks."""

import random

import pytest

from moonserve.protocol.kv_blocks import BlockKey, unpack_keys
from moonserve.protocol.membership import heartbeats
from moonserve.protocol.membership.heartbeats import BlockLog
from moonserve.protocol.pb.conductor_pb2 import BlockEvents


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def apply(view: set[BlockKey], events: BlockEvents) -> set[BlockKey]:
    if events.snapshot:
        view = set()
    return (view | set(unpack_keys(events.added_keys))) - set(unpack_keys(events.removed_keys))


def test_replayed_changes_give_the_present_blocks() -> None:
    rng = random.Random(7)
    log, view, present = BlockLog(), set(), set()
    for _ in range(2_000):
        number = rng.randrange(20)
        if rng.random() < 0.5:
            log.added(key(number), None)
            present.add(key(number))
        else:
            log.removed(key(number))
            present.discard(key(number))
        if rng.random() < 0.2:
            events = log.changes()
            if rng.random() < 0.5:  # otherwise it is lost, and sent again with later changes
                view = apply(view, events)
                log.acknowledge(events)
    while log.has_changes:
        events = log.changes()
        view = apply(view, events)
        log.acknowledge(events)
    assert view == present == apply(set(), log.snapshot())


def test_too_many_pending_changes_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "MAX_PENDING", 10)
    log = BlockLog()
    log.added(key(0), None)
    under_way = log.changes()
    for number in range(1, 25):
        log.added(key(number), None)
    log.acknowledge(under_way)
    events = log.changes()
    assert events.snapshot
    assert events.first_seq > under_way.next_seq, "what comes late counts no more"
    assert len(unpack_keys(events.added_keys)) == 25
    log.acknowledge(events)
    assert not log.has_changes
    log.removed(key(3))
    assert not log.changes().snapshot
    assert log.changes().first_seq == events.next_seq
