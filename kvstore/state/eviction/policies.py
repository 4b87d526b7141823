"""Eviction policies: LRU, FIFO, LFU, length-aware, LRU with credit for reuse, S3-FIFO."""

import sys
from collections import OrderedDict

from moonserve.kvstore.index_layout import NO_RECORD, Record, RecordArray
from moonserve.kvstore.state.eviction.base import Column, EvictionPolicy, RankHeap
from moonserve.protocol.kv_blocks import BlockKey


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the least recently used block first.

    Suits loads where the chance of another use falls with the time since the last one.
    """

    name = "lru"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self.used(record)

    def used(self, record: Record) -> None:
        self._set_rank(record, 0, self._tick())

    def used_all(self, records: RecordArray) -> None:
        self._ranks.rank_all(records, self._clock + 1)
        self._clock += len(records)


class FirstInFirstOut(EvictionPolicy):
    """Evicts the oldest block first. A baseline: a policy that counts uses has to beat it."""

    name = "fifo"

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._set_rank(record, 0, self._tick())

    def used(self, record: Record) -> None:
        """Ignored: uses do not change the order."""

    def used_all(self, records: RecordArray) -> None:
        """Ignored: uses do not change the order."""


MAX_USES = 2**32 - 1
"""The largest number in a column."""


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the least used block first, with aging counts (LFU-DA). Among equals, the least recently used first."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._num_uses = Column("I")  # of resident records
        self._age = 0.0  # rank of the last victim

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self.used(record)

    def used(self, record: Record) -> None:
        self._num_uses[record] = min(self._num_uses[record] + 1, MAX_USES)
        self._set_rank(record, self._age + self._num_uses[record], self._tie(record))

    def forget(self, record: Record) -> None:
        if record == self._last_victim:
            # The maximum, since ages never fall: a parent may be evicted long after its rank became low.
            self._age = max(self._age, self._ranks.rank_of(record)[0])
            self._last_victim = NO_RECORD
        self._num_uses[record] = 0
        super().forget(record)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._num_uses.nbytes

    def _tie(self, record: Record) -> int:
        """Returns the secondary rank: among blocks of equal primary rank, the lowest is evicted first."""
        return self._tick()


MAX_DEPTH = 2**20 - 1
"""Deeper blocks count as this deep."""
TICKS = 2**44
"""Range of the clock in the lower bits of a 64-bit rank: five years at 100,000 uses a second."""


class LengthAware(LeastFrequentlyUsed):
    """Evicts like LFU, but among equals the block that is deeper in its chain first.

    Source: Mooncake, FAST'25, table of cache policies.
    """

    name = "length-aware"

    def __init__(self) -> None:
        super().__init__()
        self._depths = Column("I")  # 1 = head of its chain, 0 = not resident

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        # If the parent is absent, the depth is unknown; 1 keeps the block longest.
        self._depths[record] = min(self._depths[parent] + 1, MAX_DEPTH)
        super().added(record, key, parent)

    def forget(self, record: Record) -> None:
        super().forget(record)
        self._depths[record] = 0

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._depths.nbytes

    def _tie(self, record: Record) -> int:
        return (MAX_DEPTH - self._depths[record]) * TICKS + self._tick() % TICKS


MAX_CREDIT = 3
"""Lifetimes. Without a limit, blocks that were popular once would stay forever. S3-FIFO has the same limit."""
RUN_OF_A_LIFETIME = 1 / 128
"""Depth, as a share of the resident blocks, at which the debt is one lifetime (measured: docs/store-eviction.md)."""
SMOOTHING = 0.01
"""Weight of a victim in the mean lifetime: about the last hundred unread victims count."""


class ReuseCredit(EvictionPolicy):
    """LRU with credit for blocks that were read again, and debt for long runs that were not read yet.

    LRU evicts by age alone: at a capacity below the working set, it evicts nearly every block before its next use,
    although some blocks are several times as likely to have one. A store sees two things that tell them apart. Every
    use of a block makes another more likely, since a conversation that went on tends to go on. And a long run of new
    blocks is less likely to be continued than a short one (a turn of a conversation), while keeping it displaces more
    other blocks.

    So a block's rank is the time of its last use, in uses of the store, moved later by one lifetime for each read and,
    until the first read, moved earlier by its depth in its run. A *run* is a sequence of blocks that were stored behind
    one another and not read since; depth counts from the last block that was read, or from the head of the chain. A
    *lifetime* is the mean age at which unread victims are evicted, so that credit scales with capacity and traffic.
    Debt scales with the run's share of the store, so that it does not depend on the size of blocks.
    """

    name = "reuse-credit"

    def __init__(self) -> None:
        super().__init__()
        self._run_depths = Column("I")  # 1 = first of its run, 0 = not resident
        self._num_reads = Column("B")  # up to MAX_CREDIT
        self._num_residents = 0
        self._lifetime = 0.0  # in uses of the store
        self._num_lifetimes = 0  # samples in the mean

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._run_depths[record] = 1 if self._num_reads[parent] else self._run_depths[parent] + 1
        self._num_reads[record] = 0
        self._num_residents += 1
        self._rank(record)

    def used(self, record: Record) -> None:
        self._num_reads[record] = min(self._num_reads[record] + 1, MAX_CREDIT)
        self._rank(record)

    def forget(self, record: Record) -> None:
        if self._run_depths[record]:
            if record == self._last_victim and not self._num_reads[record]:
                self._learn(self._clock - self._ranks.rank_of(record)[1])
            self._run_depths[record] = self._num_reads[record] = 0
            self._num_residents -= 1
        self._last_victim = NO_RECORD
        super().forget(record)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._run_depths.nbytes + self._num_reads.nbytes

    def _learn(self, lifetime: int) -> None:
        self._num_lifetimes += 1
        weight = max(SMOOTHING, 1 / self._num_lifetimes)  # plain mean at first
        self._lifetime += weight * (lifetime - self._lifetime)

    def _rank(self, record: Record) -> None:
        used_at = self._tick()
        if num_reads := self._num_reads[record]:
            credit = float(num_reads)
        else:
            credit = -self._run_depths[record] / self._num_residents / RUN_OF_A_LIFETIME
        self._set_rank(record, used_at + credit * self._lifetime, used_at)


SMALL_SHARE = 0.1
"""Share of the resident blocks in the small queue (section 4.1 of the paper)."""
MAX_READS = 3
"""Limit of the counts: two bits per block, as in the paper."""
READS_TO_STAY = 2
"""`freq > 1` in the paper's algorithm 1."""
_SMALL, _MAIN = 1, 2
"""Values of `_queues`."""


class S3Fifo(EvictionPolicy):
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023).

    New blocks enter a small queue, a tenth of the store. At its end, a block that was read at least twice meanwhile
    moves to the main queue; any other is evicted and remembered as a ghost. A block that is stored again while it is a
    ghost goes straight to the main queue. At the end of the main queue, a block that was read goes round again, with
    its count one lower.

    Here only blocks on offer can be evicted. A block keeps its place in its queue while it is withdrawn, and a queue's
    end is its oldest block *on offer*. So the head of a chain keeps its place until its followers have left, and its
    reads meanwhile count. Shares are of all resident blocks, on offer or not. If the queue whose turn it is has nothing
    on offer, the victim comes from the other one.
    """

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
        if record == self._last_victim and is_small:
            self._ghosts[self._digests[record]] = None
        while len(self._ghosts) > self._num_residents:
            self._ghosts.popitem(last=False)
        self._last_victim = NO_RECORD

    def victim(self) -> Record:
        self._last_victim = NO_RECORD
        while self._last_victim == NO_RECORD and (candidate := self._candidate()) != NO_RECORD:
            if not self._requeue_if_read(candidate):
                self._last_victim = candidate
        return self._last_victim

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

    def _requeue_if_read(self, record: Record) -> bool:
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
