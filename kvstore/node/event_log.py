"""Log of a node's numbered events, and the event streams of its followers.

A follower that is new or too far behind gets an inventory first (`subscribe`). While there are no followers, events are
only counted.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from moonserve.kvstore.state.objects import Tier
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.membership.heartbeats import BlockLog
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.event_loop import wait_event

KEPT_EVENTS = 50_000
"""About a second of a busy node. For a follower that is further behind, an inventory is cheaper."""


@dataclass(frozen=True, slots=True)
class Event:
    """An object was added, or has `left`."""

    key: BlockKey
    parent: BlockKey | None = None
    left: bool = False


@dataclass(slots=True, eq=False)
class Subscription:
    """A follower's position in the log."""

    next_seq: int
    reads: bytearray = field(default_factory=bytearray)  # packed keys
    wake: Callable[[], None] = lambda: None


class EventLog:
    """The events of one incarnation of a node, numbered from 1. Implements `Announcements`.

    Events are also passed to `conductor`, which tracks holders but not tiers.
    """

    def __init__(self, conductor: BlockLog | None = None) -> None:
        self._conductor = conductor
        self.next_seq = 1
        self.closed = False
        self._kept: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._followers: list[Subscription] = []

    def subscribe(self, next_seq: int) -> Subscription:
        """Adds a follower that has seen all events before `next_seq`."""
        follower = Subscription(next_seq)
        self._followers.append(follower)
        return follower

    def unsubscribe(self, follower: Subscription) -> None:
        self._followers.remove(follower)
        if not self._followers:
            self._kept.clear()

    def close(self) -> None:
        """Ends all streams."""
        self.closed = True
        for follower in self._followers:
            follower.wake()

    def needs_snapshot(self, follower: Subscription) -> bool:
        """Returns True if the log no longer has all events that the follower has not seen: it needs an inventory."""
        return not self.next_seq - len(self._kept) <= follower.next_seq <= self.next_seq

    def next_events(self, follower: Subscription, limit: int) -> list[Event]:
        """Returns the next events of a follower that has missed none, and advances it."""
        assert not self.needs_snapshot(follower)
        behind = min(self.next_seq - follower.next_seq, limit)
        start = len(self._kept) - (self.next_seq - follower.next_seq)
        follower.next_seq += behind
        return [self._kept[start + index] for index in range(behind)]

    def take_reads(self, follower: Subscription) -> bytes:
        """Returns and clears the packed keys of the reads since the last call."""
        reads, follower.reads = follower.reads, bytearray()
        return bytes(reads)

    def report_reads(self, packed_keys: bytes) -> None:
        """Reports reads of these objects to all followers. Keys are packed, 16 bytes each; an excess is dropped."""
        for follower in self._followers:
            follower.reads += packed_keys[: KEPT_EVENTS * KEY_BYTES - len(follower.reads)]

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        self._note(Event(key, parent))
        if self._conductor is not None:
            self._conductor.added(key, parent)

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """Ignored: followers track holders, not tiers."""

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
# A short wait after the first change, so that one message carries several.
BATCHING_S = 0.02
# A message is sent at least this often: it serves as a heartbeat and carries the reads.
IDLE_S = 1.0


async def subscription_messages(
    log: EventLog, state: StoreState, epoch: int, request: kvstore_pb2.StoreSubscribeRequest
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """Yields the messages for one follower until it disconnects or the log is closed."""
    follower = log.subscribe(request.next_seq if request.epoch == epoch else 0)
    woken = asyncio.Event()
    follower.wake = woken.set
    try:
        while not log.closed:
            woken.clear()
            if log.needs_snapshot(follower):
                async for message in _snapshot(log, state, epoch, follower):
                    yield message
                continue  # if it took too long, the follower needs another inventory
            first_seq = follower.next_seq
            events = log.next_events(follower, EVENTS_PER_MESSAGE)
            message = message_of(epoch, first_seq, events, snapshot=False, more=False)
            message.next_seq = follower.next_seq
            message.read_keys = log.take_reads(follower)
            yield message
            if follower.next_seq == log.next_seq and await wait_event(woken, IDLE_S):
                await asyncio.sleep(BATCHING_S)
    finally:
        log.unsubscribe(follower)


async def _snapshot(
    log: EventLog, state: StoreState, epoch: int, follower: Subscription
) -> AsyncIterator[kvstore_pb2.StoreEvents]:
    """Yields all objects, in pieces. Changes meanwhile are in the log; the receiver tolerates replays."""
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
    """Returns a message of these events, reduced to the last one of each key."""
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
