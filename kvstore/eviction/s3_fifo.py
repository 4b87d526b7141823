"""S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023).

New blocks enter a small queue, a tenth of the store. At its end, a block that was read at least twice meanwhile moves
to the main queue; any other is evicted and remembered as a ghost. A block that is stored again while it is a ghost goes
straight to the main queue. At the end of the main queue, a block that was read goes round again, with its count one
lower.

Here only blocks on offer can be evicted. A block keeps its place in its queue while it is withdrawn, and a queue's end
is its oldest block *on offer*. So the head of a chain keeps its place until its followers have left, and its reads
meanwhile count. Shares are of all resident blocks, on offer or not. If the queue whose turn it is has nothing on offer,
the victim comes from the other one.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from kvstore.eviction.base import Column, EvictionPolicy
from kvstore.native.base import NO_RECORD, Record
from kvstore.native.metadata import RankHeap
from protocol.keys import BlockKey

SMALL_SHARE = 0.1
"""Share of the resident blocks in the small queue (section 4.1 of the paper)."""
MAX_READS = 3
"""Limit of the counts: two bits per block, as in the paper."""
READS_TO_STAY = 2
"""`freq > 1` in the paper's algorithm 1."""
_SMALL, _MAIN = 1, 2
"""Values of `_queues`."""


class S3Fifo(EvictionPolicy):
    """S3-FIFO: two queues, and the ghosts of blocks evicted from the small one."""

    name = "s3-fifo"

    def __init__(self) -> None:
        super().__init__()  # the clock counts entries into queues
        self._small, self._main = self._ranks, RankHeap()  # the heaps have the records on offer
        self._queues = Column("B")  # 0 = not resident
        self._num_reads = Column("B")  # since added or moved to main, less one per round in main
        # Python's hash of the keys, with a secret seed, so that clients cannot forge collisions, which only cost a hit.
        self._digests = Column("q")
        self._num_small = self._num_residents = 0
        self._ghosts: OrderedDict[int, None] = OrderedDict()  # digests, oldest first; at most as many as residents
        self._named = NO_RECORD  # the last victim, until a record is forgotten

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        digest = hash(key)
        is_small = digest not in self._ghosts
        self._ghosts.pop(digest, None)
        self._queues[record] = _SMALL if is_small else _MAIN
        self._num_reads[record] = 0
        self._digests[record] = digest
        self._num_small += is_small
        self._num_residents += 1
        self._queue_up(record)

    def used(self, record: Record) -> None:
        self._num_reads[record] = min(self._num_reads[record] + 1, MAX_READS)

    def offer(self, record: Record) -> None:
        self._queue_of(record).offer(record)

    def withdraw(self, record: Record) -> None:
        self._queue_of(record).discard(record)

    def forget(self, record: Record) -> None:
        self.withdraw(record)
        if not self._queues[record]:
            return
        is_small = self._is_small(record)
        self._queues[record] = 0
        self._num_small -= is_small
        self._num_residents -= 1
        if record == self._named and is_small:
            self._ghosts[self._digests[record]] = None
        while len(self._ghosts) > self._num_residents:
            self._ghosts.popitem(last=False)
        self._named = NO_RECORD

    def victim(self) -> Record:
        self._named = NO_RECORD
        while self._named == NO_RECORD and (candidate := self._candidate()) != NO_RECORD:
            if not self._spare(candidate):
                self._named = candidate
        return self._named

    @property
    def nbytes(self) -> int:
        parts = self._small, self._main, self._queues, self._num_reads, self._digests
        ghosts = sys.getsizeof(self._ghosts) + len(self._ghosts) * sys.getsizeof(2**62)
        return sum(part.nbytes for part in parts) + ghosts

    def _candidate(self) -> Record:
        """Returns the record at the end of the queue whose turn it is."""
        small, main = self._small.first(), self._main.first()
        if self._num_small >= SMALL_SHARE * self._num_residents:
            return small if small != NO_RECORD else main
        return main if main != NO_RECORD else small

    def _spare(self, record: Record) -> bool:
        """Moves a record to the back of the main queue if it was read often enough. Returns False if it was not."""
        is_small, num_reads = self._is_small(record), self._num_reads[record]
        if num_reads < (READS_TO_STAY if is_small else 1):
            return False
        self.withdraw(record)
        self._num_small -= is_small
        self._queues[record] = _MAIN
        self._num_reads[record] = 0 if is_small else num_reads - 1
        self._queue_up(record)
        self.offer(record)
        return True

    def _is_small(self, record: Record) -> bool:
        return self._queues[record] == _SMALL

    def _queue_of(self, record: Record) -> RankHeap:
        return self._small if self._is_small(record) else self._main

    def _queue_up(self, record: Record) -> None:
        self._clock += 1
        self._queue_of(record).rank(record, 0, self._clock)
