"""Block events: whatever is lost or repeated, the conductor's view can be made whole."""

from __future__ import annotations

import random

import pytest

from protocol import membership
from protocol.keys import BlockKey, unpack_keys
from protocol.membership import BlockLog
from protocol.pb.conductor_pb2 import BlockEvents


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def apply(view: set[BlockKey], events: BlockEvents) -> set[BlockKey]:
    if events.snapshot:
        view = set()
    return (view | set(unpack_keys(events.added_keys))) - set(unpack_keys(events.removed_keys))


def test_changes_replayed_in_order_give_what_is_present() -> None:
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
            if rng.random() < 0.5:  # else it is lost, and sent again with what came since
                view = apply(view, events)
                log.acknowledge(events)
    while log.has_changes:
        events = log.changes()
        view = apply(view, events)
        log.acknowledge(events)
    assert view == present == apply(set(), log.snapshot())


def test_numbers_continue_after_an_acknowledged_snapshot() -> None:
    log = BlockLog()
    log.added(key(1), None)
    snapshot = log.snapshot()
    log.acknowledge(snapshot)
    log.added(key(2), key(1))
    changes = log.changes()
    assert changes.first_seq == snapshot.next_seq
    assert changes.next_seq == changes.first_seq + 1


def test_too_many_unsent_changes_become_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_PENDING", 10)
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
