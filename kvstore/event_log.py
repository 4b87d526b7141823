"""What a node tells whoever follows it: numbered events, kept for as long as somebody may ask for them. Pure.

A follower that is too far behind, or new, takes an inventory first (`kvstore.subscription`). While nobody follows,
events are only counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.stored import Announcements, Tier
from protocol.keys import KEY_BYTES, BlockKey

KEPT_EVENTS = 50_000
"""About a second of a busy node; a follower that is further behind is better served by an inventory."""


@dataclass(frozen=True, slots=True)
class Event:
    """`tier` None = the object left."""

    key: BlockKey
    parent: BlockKey | None
    tier: Tier | None


@dataclass(slots=True, eq=False)
class Follower:
    """One listener's place in the log."""

    next_seq: int
    reads: bytearray = field(default_factory=bytearray)  # keys, back to back
    wake: Callable[[], None] = lambda: None


class EventLog:
    """The events of one incarnation of a node, numbered from 1."""

    def __init__(self) -> None:
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
        self._note(Event(key, parent, tier))

    def moved(self, key: BlockKey, tier: Tier) -> None:
        self._note(Event(key, None, tier))

    def removed(self, key: BlockKey) -> None:
        self._note(Event(key, None, None))

    def _note(self, event: Event) -> None:
        self.next_seq += 1
        if self._followers:
            self._kept.append(event)
            for follower in self._followers:
                follower.wake()


class ToAll:
    """Announces to each of several."""

    def __init__(self, listeners: Sequence[Announcements]) -> None:
        self._listeners = listeners

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        for listener in self._listeners:
            listener.added(key, parent, tier)

    def moved(self, key: BlockKey, tier: Tier) -> None:
        for listener in self._listeners:
            listener.moved(key, tier)

    def removed(self, key: BlockKey) -> None:
        for listener in self._listeners:
            listener.removed(key)
