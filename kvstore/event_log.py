"""What a node tells whoever follows it: numbered events, kept for as long as somebody may ask for them. Pure.

A follower that is too far behind, or new, takes an inventory first (`kvstore.event_log`). While nobody follows,
events are only counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from kvstore.state import StoreState
from kvstore.stored import Tier
from protocol.keys import KEY_BYTES, NO_PARENT, BlockKey, pack_keys
from protocol.membership import BlockLog
from protocol.pb import kvstore_pb2
from protocol.timer import set_within

KEPT_EVENTS = 50_000
"""About a second of a busy node; a follower that is further behind is better served by an inventory."""


@dataclass(frozen=True, slots=True)
class Event:
    """An object came, or left."""

    key: BlockKey
    parent: BlockKey | None = None
    left: bool = False


@dataclass(slots=True, eq=False)
class Follower:
    """One listener's place in the log."""

    next_seq: int
    reads: bytearray = field(default_factory=bytearray)  # keys, back to back
    wake: Callable[[], None] = lambda: None


class EventLog:
    """The events of one incarnation of a node, numbered from 1 (`Announcements`).

    A conductor is told through `conductor`: it asks who holds a block, not in which tier.
    """

    def __init__(self, conductor: BlockLog | None = None) -> None:
        self._conductor = conductor
        self.next_seq = 1
        self.closed = False
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._followers: list[Follower] = []

    def follow(self, next_seq: int) -> Follower:
        """A new listener that has seen all events before `next_seq`."""
        follower = Follower(next_seq)
        self._followers.append(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)
        if not self._followers:
            self._kept.clear()

    def close(self) -> None:
        """Nothing more will be told."""
        self.closed = True
        for follower in self._followers:
            follower.wake()

    def missed(self, follower: Follower) -> bool:
        """Whether events that it has not seen are no longer known: it needs an inventory."""
        return not self.next_seq - len(self._kept) <= follower.next_seq <= self.next_seq

    def take(self, follower: Follower, limit: int) -> list[Event]:
        """The next events of a follower that has missed none; they count as seen."""
        assert not self.missed(follower)
        behind = min(self.next_seq - follower.next_seq, limit)
        start = len(self._kept) - (self.next_seq - follower.next_seq)
        follower.next_seq += behind
        return [self._kept[start + index] for index in range(behind)]

    def take_reads(self, follower: Follower) -> bytes:
        """Their keys, back to back."""
        reads, follower.reads = follower.reads, bytearray()
        return bytes(reads)

    def read(self, packed_keys: bytes) -> None:
        """These objects were read: 16-byte keys, back to back."""
        for follower in self._followers:
            follower.reads += packed_keys[: KEPT_EVENTS * KEY_BYTES - len(follower.reads)]

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        self._note(Event(key, parent))
        if self._conductor is not None:
            self._conductor.added(key, parent)

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """Followers ask who holds an object, not in which tier."""

    def removed(self, key: BlockKey) -> None:
        self._note(Event(key, left=True))
        if self._conductor is not None:
            self._conductor.removed(key)

    def _note(self, event: Event) -> None:
        self.next_seq += 1
        if self._followers:
            self._kept.append(event)
            for follower in self._followers:
                follower.wake()


# About 1.5 MiB on the wire.
EVENTS_PER_MESSAGE = 40_000
# Waiting a little after the first change gathers the changes of a moment into one message.
GATHER_S = 0.02
# A follower learns this often that the node lives, and what was read.
IDLE_S = 1.0


async def follow(
    log: EventLog, state: StoreState, epoch: int, request: kvstore_pb2.StoreSubscribeRequest
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """The messages for one caller, until it goes away or the log is closed."""
    follower = log.follow(request.next_seq if request.epoch == epoch else 0)
    woken = asyncio.Event()
    follower.wake = woken.set
    try:
        while not log.closed:
            woken.clear()
            if log.missed(follower):
                async for message in _inventory(log, state, epoch, follower):
                    yield message
                continue  # it may have taken so long that the log has gone on without it
            first_seq = follower.next_seq
            events = log.take(follower, EVENTS_PER_MESSAGE)
            message = message_of(epoch, first_seq, events, snapshot=False, more=False)
            message.next_seq = follower.next_seq
            message.read_keys = log.take_reads(follower)
            yield message
            if follower.next_seq == log.next_seq and await set_within(woken, IDLE_S):
                await asyncio.sleep(GATHER_S)
    finally:
        log.leave(follower)


async def _inventory(
    log: EventLog, state: StoreState, epoch: int, follower: Follower
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """Everything, in pieces. What changes meanwhile is in the log, whose replay the receiver can bear."""
    follower.next_seq = log.next_seq
    first = True
    found: list[Event] = []
    for stored in state.catalog.objects():
        found.append(Event(stored.key, stored.parent))
        if len(found) == EVENTS_PER_MESSAGE:
            yield message_of(epoch, follower.next_seq, found, snapshot=first, more=True)
            first, found = False, []
            await asyncio.sleep(0)
    yield message_of(epoch, follower.next_seq, found, snapshot=first, more=False)


def message_of(
    epoch: int, first_seq: int, events: Sequence[Event], *, snapshot: bool, more: bool
) -> kvstore_pb2.StoreEvents:
    """The last event of each key says what is so; a message lists what is there and what has gone apart."""
    latest = {event.key: event for event in events}
    present = [event for event in latest.values() if not event.left]
    return kvstore_pb2.StoreEvents(
        epoch=epoch,
        first_seq=first_seq,
        next_seq=first_seq,
        snapshot=snapshot,
        more=more,
        added_keys=pack_keys([event.key for event in present]),
        added_parents=pack_keys([event.parent or NO_PARENT for event in present]),
        removed_keys=pack_keys([event.key for event in latest.values() if event.left]),
    )
