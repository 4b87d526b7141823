"""Hints about the further use of objects (`protocol.request.CacheHints`), and the order that follows from them. Pure.

Hints sort the objects of a tier into classes, which leave one after another; within a class the eviction policy
decides. An object without hints is NORMAL. A return is expected of a whole chain, since the blocks before its last one
cannot leave earlier anyway: so `kept_bytes` is all that expected returns keep in memory, and `Evictor` bounds it. A use
or the end of the time ends the expectation. Then the policy ranks the chain as if there had been no hint: by its last
use, which is long ago if the return did not come.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, auto

from moonserve.kvstore.index_layout import NO_RECORD, Record
from moonserve.kvstore.state.objects import Tier

MAX_KEPT_SHARE = 0.5
"""Share of the memory that expected returns may keep: clients cannot take the store from others by hints."""
MAX_CHAIN = 4_096
"""Blocks of a longer chain, for which no return is expected: finding them would take more than ten milliseconds."""
MAX_EXPIRIES = 1_024
"""Hints that end in one call, a few milliseconds. The others end in the next calls."""


class LeaveOrder(IntEnum):
    """Classes of the objects in one tier, in the order in which they leave it."""

    FIRST = 0  # of low priority, unused for its TTL, or expected after it would have left memory
    NORMAL = 1
    KEPT = 2


class Expected(Enum):
    """How an expected return is treated."""

    NOT = auto()
    KEPT = auto()  # kept in memory
    AWAY = auto()  # moved to disk early, since memory is not likely to hold it for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectHints:
    """The hints in force on one object."""

    space: int  # bytes of memory that it takes
    used_at: float
    is_low: bool = False
    ttl_s: float = math.inf
    expected: Expected = Expected.NOT
    returns_by: float = math.inf  # set while a return is expected
    is_over: bool = False  # its TTL has passed
    queued_at: float = math.inf  # its entry among the deadlines

    def order(self, tier: Tier) -> LeaveOrder:
        in_memory = tier is Tier.MEMORY
        if self.is_low or self.is_over or (in_memory and self.expected is Expected.AWAY):
            return LeaveOrder.FIRST
        return LeaveOrder.KEPT if in_memory and self.expected is Expected.KEPT else LeaveOrder.NORMAL

    @property
    def ends_at(self) -> float:
        """Time at which the order changes unless the object is used."""
        return min(math.inf if self.is_over else self.used_at + self.ttl_s, self.returns_by)

    @property
    def is_empty(self) -> bool:
        return not self.is_low and self.ttl_s == math.inf and self.expected is Expected.NOT

    @property
    def kept_bytes(self) -> int:
        return self.space if self.expected is Expected.KEPT else 0

    def unexpected(self) -> "ObjectHints":
        """Returns the hints without the expected return. Its policy ranks the object by its last use."""
        return replace(self, expected=Expected.NOT, returns_by=math.inf)

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
        self._kept: dict[Record, None] = {}  # expected last at the end, and each block after those that follow it
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
        self._kept.pop(record, None)
        self._num_kept_followers[self._parents.pop(record, NO_RECORD)] -= 1
        if hints is None or hints.is_empty:
            return
        if hints.ends_at < hints.queued_at:
            hints = replace(hints, queued_at=hints.ends_at)
            heapq.heappush(self._deadlines, (hints.queued_at, record))
        self._of[record] = hints
        self.kept_bytes += hints.kept_bytes
        if hints.expected is Expected.KEPT:
            self._kept[record] = None
            self._parents[record] = parent = self._parent_of(record)
            self._num_kept_followers[parent] += 1

    def keeps_follower(self, record: Record) -> bool:
        """Returns True if a block after this one is kept: then this one cannot leave either."""
        return self._num_kept_followers[record] > 0

    def expected_first(self) -> tuple[Record, ObjectHints]:
        """Returns the object of those kept in memory whose return was expected first."""
        record = next(iter(self._kept))
        return record, self._of[record]

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
        assert self.kept_bytes == sum(self._of[record].space for record in self._kept)
        assert self._kept.keys() == {r for r, hints in self._of.items() if hints.expected is Expected.KEPT}
        queued = set(self._deadlines)
        assert all(h.ends_at == math.inf or (h.queued_at, record) in queued for record, h in self._of.items())


class Turnover:
    """Time in which as many bytes enter memory as fit into it: about how long an unused object stays there."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entered_bytes = 0
        self._began_at = 0.0
        self._lifetime_s = math.inf  # until memory was filled once

    def entered(self, nbytes: int, now: float) -> None:
        self._entered_bytes += nbytes
        if self._entered_bytes >= self._capacity:
            self._lifetime_s = now - self._began_at
            self._entered_bytes, self._began_at = 0, now

    def lifetime_s(self, now: float) -> float:
        return max(self._lifetime_s, now - self._began_at)
