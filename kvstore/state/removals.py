"""Log of removals of all replicas, kept for nodes that were away. Pure: `now` is an argument.

A removal of all replicas has an id, the same at every node. A node executes it once, whichever node reports it. Nodes
exchange ages, never instants, since the clocks of hosts differ. Rules: a removal older than `kept_s` is neither
reported nor accepted; a removal that is forgotten, by age or for lack of space, shortens `covered_s`. Does not know
what is stored, nor the other nodes.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from moonserve.protocol.kv_blocks import BlockKey

MAX_REMOVALS = 100_000
"""Limit of the log: about 40 MB."""
KEPT_S = 86_400.0
"""How long a removal is kept. A node that was away for longer begins empty."""
CLOCK_DRIFT = 1e-3
"""Largest difference of the rates of two hosts' clocks: NTP adjusts each by up to 500 ppm."""
_KEPT_FACTOR = 1.25
"""Entries are kept this factor longer than `kept_s`, so that a removal that a peer still reports is known here."""


class Removal(NamedTuple):
    """A removal as noted here. `at` is an instant of this node's clock, not earlier than the removal."""

    key: BlockKey
    removal_id: int
    at: float


class ReportedRemoval(NamedTuple):
    """A removal as nodes report it to each other."""

    key: BlockKey
    removal_id: int
    age_s: float


class RemovalPage(NamedTuple):
    """A part of a node's log of removals."""

    removals: list[ReportedRemoval]
    next_seq: int
    more: bool


class RemovalLog:
    """The removals known in one life of a node, numbered from 1 in the order in which it learned them."""

    def __init__(self, life: int, now: float, *, kept_s: float = KEPT_S, max_count: int = MAX_REMOVALS) -> None:
        self.life = life
        self.next_seq = 1
        self._kept_s = kept_s
        self._max_count = max_count
        self._log: deque[Removal] = deque()
        self._known: set[tuple[BlockKey, int]] = set()
        self._effective: set[tuple[BlockKey, int]] = set()  # known ones that removed an object here
        self._last: dict[BlockKey, Removal] = {}
        self._since = now  # all removals since then were noted
        self._forgotten_at = float("-inf")

    def __len__(self) -> int:
        return len(self._log)

    def execute(self, keys: Iterable[BlockKey], removal_id: int, now: float) -> list[BlockKey]:
        """Notes a removal requested at this node. Returns the keys for which it is new."""
        return [key for key in dict.fromkeys(keys) if self._note(Removal(key, removal_id, now))]

    def learn(self, heard: Iterable[ReportedRemoval], now: float) -> list[Removal]:
        """Notes removals reported by another node. Returns the new ones. An age measured by a fast clock is too large,
        and objects stored shortly before the removal would survive it, so ages are reduced by `CLOCK_DRIFT`."""
        young = (each for each in heard if each.age_s < self._kept_s)
        told = (Removal(key, removal_id, now - age_s * (1.0 - CLOCK_DRIFT)) for key, removal_id, age_s in young)
        return [removal for removal in told if self._note(removal)]

    def mark_effective(self, keys: Iterable[BlockKey], removal_id: int) -> None:
        """Notes that this removal has removed objects of these keys here."""
        took = {(key, removal_id) for key in keys}
        self._effective |= took & self._known

    def num_effective(self, keys: Iterable[BlockKey], removal_id: int) -> int:
        """Returns for how many of these keys this removal has removed an object here."""
        return sum((key, removal_id) in self._effective for key in set(keys))

    def last_id(self, key: BlockKey) -> int:
        """Returns the id of the last known removal of `key`; 0 = none."""
        known = self._last.get(key)
        return 0 if known is None else known.removal_id

    def age_s(self, key: BlockKey, now: float) -> float:
        """Returns the age of the last known removal of `key`; 0 = none."""
        known = self._last.get(key)
        return 0.0 if known is None else max(now - known.at, 0.0)

    def page_from(self, next_seq: int, limit: int, now: float) -> RemovalPage:
        """Returns the removals from `next_seq` on, at most `limit`."""
        first = self.next_seq - len(self._log)
        begin = min(max(next_seq, first), self.next_seq)
        end = min(begin + limit, self.next_seq)
        told = islice(self._log, begin - first, end - first)
        heard = [ReportedRemoval(r.key, r.removal_id, max(now - r.at, 0.0)) for r in told]
        young = [each for each in heard if each.age_s < self._kept_s]
        return RemovalPage(young, end, end < self.next_seq)

    def all(self) -> Sequence[Removal]:
        return list(self._log)

    # How much of the past is known

    def covered_s(self, now: float) -> float:
        """Returns the coverage in seconds: every removal of this last time is known here if a node executed it that is,
        or since then was, in touch with this node."""
        return min(now - max(self._since, self._forgotten_at), self._kept_s)

    def extend_coverage(self, covered_s: float, now: float) -> None:
        """Extends coverage: this node has learned all removals of a node with this coverage."""
        self._since = min(self._since, now - covered_s)

    def limit_coverage(self, covered_s: float, now: float) -> None:
        """Limits coverage: removals before the last `covered_s` seconds may have been missed."""
        self._since = max(self._since, now - covered_s)

    def expire(self, now: float) -> None:
        """Forgets removals older than `kept_s` with slack."""
        while self._log and self._log[0].at < now - self._kept_s * _KEPT_FACTOR:
            self._forget()

    def validate(self) -> None:
        """Raises AssertionError unless the views of the log agree."""
        assert self._known == {(r.key, r.removal_id) for r in self._log}
        assert len(self._known) == len(self._log) <= self._max_count
        assert self._effective <= self._known
        assert self._last == {r.key: r for r in self._log}

    def _note(self, removal: Removal) -> bool:
        identity = removal.key, removal.removal_id
        if identity in self._known:
            return False
        self._known.add(identity)
        self._last[removal.key] = removal
        self._log.append(removal)
        self.next_seq += 1
        if len(self._log) > self._max_count:
            self._forget()
        return True

    def _forget(self) -> None:
        gone = self._log.popleft()
        self._known.remove((gone.key, gone.removal_id))
        self._effective.discard((gone.key, gone.removal_id))
        if self._last[gone.key] is gone:
            del self._last[gone.key]
        self._forgotten_at = max(self._forgotten_at, gone.at)
