"""Hints about the further use of objects (`protocol.request.CacheHints`), and the order that follows from them. Pure.

Hints sort the objects of a tier into classes, which leave one after another; within a class the eviction policy
decides. An object without hints is NORMAL. A return is expected of a whole chain, since the blocks before its last one
cannot leave earlier anyway: so `kept_bytes` is all that expected returns keep in memory, and `Evictor` bounds it: the
chains whose time ends last are kept no longer. A use or the end of the time ends the expectation. Then the policy ranks
the chain as if there had been no hint: by its last use, which is long ago if the return did not come.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from moonserve.kvstore.index_layout import NO_RECORD, Record
from moonserve.kvstore.state.objects import Tier

MAX_KEPT_SHARE = 0.5
"""Share of the memory that expected returns may keep: clients cannot take the store from others by hints."""
MAX_CHAIN = 4_096
"""Blocks of a longer chain, for which no return is expected: changing all of them would take a tenth of a second."""
MAX_EXPIRIES = 1_024
"""Hints that end in one call, a few milliseconds. The others end in the next calls."""


class LeaveOrder(IntEnum):
    """Classes of the objects in one tier, in the order in which they leave it."""

    FIRST = 0  # of low priority, or unused for its TTL
    NORMAL = 1
    KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHints:
    """The hints in force on one object."""

    space: int  # bytes of memory that it takes
    used_at: float
    is_low: bool = False
    ttl_s: float = math.inf
    returns_by: float = math.inf  # set while a return is expected
    is_over: bool = False  # its TTL has passed
    queued_at: float = math.inf  # its entry among the deadlines

    def order(self, tier: Tier) -> LeaveOrder:
        if self.is_low or self.is_over:
            return LeaveOrder.FIRST
        return LeaveOrder.KEPT if tier is Tier.MEMORY and self.is_kept else LeaveOrder.NORMAL

    @property
    def is_kept(self) -> bool:
        return self.returns_by < math.inf

    @property
    def ends_at(self) -> float:
        """Time at which the order changes unless the object is used."""
        return min(math.inf if self.is_over else self.used_at + self.ttl_s, self.returns_by)

    @property
    def is_empty(self) -> bool:
        return not self.is_low and self.ttl_s == math.inf and not self.is_kept

    @property
    def kept_bytes(self) -> int:
        return self.space if self.is_kept else 0

    def unexpected(self) -> "ObjectHints":
        """Returns the hints without the expected return. Its policy ranks the object by its last use."""
        return replace(self, returns_by=math.inf)

    def after_use(self, now: float) -> "ObjectHints":
        return replace(self.unexpected(), used_at=now, is_over=False)

    def at_end(self, now: float) -> "ObjectHints":
        """Returns the hints after `ends_at`."""
        return replace(self.unexpected(), is_over=now >= self.used_at + self.ttl_s)


class HintTable:
    """The hints of a node's objects: about 300 bytes for each object that has some."""

    def __init__(self, parent_of: Callable[[Record], Record]) -> None:
        """`parent_of`: returns the object before one in its chain, or NO_RECORD."""
        self._parent_of = parent_of
        self._parents: dict[Record, Record] = {}  # of those kept in memory
        self._num_kept_followers: Counter[Record] = Counter()
        self._of: dict[Record, ObjectHints] = {}
        self._deadlines: list[tuple[float, Record]] = []  # heap; entries that are not an object's `queued_at` are void
        # Heap of the last blocks of kept chains, those whose time ends last first; some entries are void.
        self._ends: list[tuple[float, Record]] = []
        self.kept_bytes = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, record: Record) -> bool:
        return record in self._of

    def get(self, record: Record) -> ObjectHints | None:
        return self._of.get(record)

    def set(self, record: Record, hints: ObjectHints | None) -> None:
        """Sets an object's hints. None, and hints that say nothing: none."""
        before = self._of.pop(record, None)
        self.kept_bytes -= 0 if before is None else before.kept_bytes
        self._count_follower(self._parents.pop(record, NO_RECORD), -1)
        if hints is None or hints.is_empty:
            return
        if hints.ends_at < hints.queued_at:
            hints = replace(hints, queued_at=hints.ends_at)
            heapq.heappush(self._deadlines, (hints.queued_at, record))
        self._of[record] = hints
        self.kept_bytes += hints.kept_bytes
        if hints.is_kept:
            self._parents[record] = self._parent_of(record)
            self._count_follower(self._parents[record], 1)
            self._queue_end(record)

    def _count_follower(self, parent: Record, change: int) -> None:
        if parent == NO_RECORD:
            return
        self._num_kept_followers[parent] += change
        if not self._num_kept_followers[parent]:
            del self._num_kept_followers[parent]
        self._queue_end(parent)

    def _queue_end(self, record: Record) -> None:
        if not self.is_kept_end(record):
            return
        heapq.heappush(self._ends, (-self._of[record].returns_by, record))
        if len(self._ends) > 2 * len(self._parents) + 64:
            self._ends = [(-self._of[each].returns_by, each) for each in self._parents if self.is_kept_end(each)]
            heapq.heapify(self._ends)

    def is_kept_end(self, record: Record) -> bool:
        """Returns True if this block is kept, and none that follows it."""
        return record in self._parents and not self.keeps_follower(record)

    def keeps_follower(self, record: Record) -> bool:
        """Returns True if a block after this one is kept: then this one cannot leave either."""
        return self._num_kept_followers[record] > 0

    def kept_last(self) -> tuple[Record, ObjectHints]:
        """Returns the last block of the kept chain whose time ends last."""
        while True:
            negative, record = self._ends[0]
            if self.is_kept_end(record) and self._of[record].returns_by == -negative:
                return record, self._of[record]
            heapq.heappop(self._ends)

    def due(self, now: float) -> Iterator[tuple[Record, ObjectHints]]:
        """Yields the objects whose hints have ended at `now`, MAX_EXPIRIES at most. The caller sets new ones."""
        for _ in range(MAX_EXPIRIES):
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            at, record = heapq.heappop(self._deadlines)
            hints = self._of.get(record)
            if hints is None or hints.queued_at != at:
                continue
            if hints.ends_at <= now:
                yield record, replace(hints, queued_at=math.inf)
                continue
            self._of[record] = replace(hints, queued_at=hints.ends_at)  # `set` would move it among the kept ones
            if hints.ends_at < math.inf:
                heapq.heappush(self._deadlines, (hints.ends_at, record))

    def validate(self) -> None:
        """Raises AssertionError unless `kept_bytes` is right and every end is queued."""
        kept = {record for record, hints in self._of.items() if hints.is_kept}
        assert self.kept_bytes == sum(self._of[record].space for record in kept)
        assert self._parents.keys() == kept
        ends = {(-self._of[record].returns_by, record) for record in kept - set(self._parents.values())}
        assert ends <= set(self._ends)
        queued = set(self._deadlines)
        assert all(h.ends_at == math.inf or (h.queued_at, record) in queued for record, h in self._of.items())
