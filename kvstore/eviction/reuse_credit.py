"""LRU with credit for blocks that were read again, and debt for long runs that were not read yet.

LRU evicts by age alone: at a capacity below the working set, it evicts nearly every block before its next use, although
some blocks are several times as likely to have one. A store sees two things that tell them apart. Every use of a block
makes another more likely, since a conversation that went on tends to go on. And a long run of new blocks is less likely
to be continued than a short one (a turn of a conversation), while keeping it displaces more other blocks.

So a block's rank is the time of its last use, in uses of the store, moved later by one lifetime for each read and,
until the first read, moved earlier by its depth in its run. A *run* is a sequence of blocks that were stored behind one
another and not read since; depth counts from the last block that was read, or from the head of the chain. A *lifetime*
is the mean age at which unread victims are evicted, so that credit scales with capacity and traffic. Debt scales with
the run's share of the store, so that it does not depend on the size of blocks.
"""

from __future__ import annotations

from kvstore.eviction.base import Column, EvictionPolicy
from kvstore.native.base import NO_RECORD, Record
from protocol.keys import BlockKey

MAX_CREDIT = 3
"""Lifetimes. Without a limit, blocks that were popular once would stay forever. S3-FIFO has the same limit."""
RUN_OF_A_LIFETIME = 1 / 128
"""Depth, as a share of the resident blocks, at which the debt is one lifetime (measured: docs/store-eviction.md)."""
SMOOTHING = 0.01
"""Weight of a victim in the mean lifetime: about the last hundred unread victims count."""


class ReuseCredit(EvictionPolicy):
    """Evicts the least recently used block first, with reads and run depth counted as time."""

    name = "reuse-credit"

    def __init__(self) -> None:
        super().__init__()
        self._run_depths = Column("I")  # 1 = first of its run, 0 = not resident
        self._num_reads = Column("B")  # up to MAX_CREDIT
        self._num_residents = 0
        self._lifetime = 0.0  # in uses of the store
        self._num_lifetimes = 0  # samples in the mean
        self._named = NO_RECORD  # the last victim, until a record is forgotten

    def added(self, record: Record, key: BlockKey, parent: Record) -> None:
        self._run_depths[record] = 1 if self._num_reads[parent] else self._run_depths[parent] + 1
        self._num_reads[record] = 0
        self._num_residents += 1
        self._rank(record)

    def used(self, record: Record) -> None:
        self._num_reads[record] = min(self._num_reads[record] + 1, MAX_CREDIT)
        self._rank(record)

    def victim(self) -> Record:
        self._named = super().victim()
        return self._named

    def forget(self, record: Record) -> None:
        if self._run_depths[record]:
            if record == self._named and not self._num_reads[record]:
                self._learn(self._clock - self._ranks.rank_of(record)[1])
            self._run_depths[record] = self._num_reads[record] = 0
            self._num_residents -= 1
        self._named = NO_RECORD
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
        self._place(record, used_at + credit * self._lifetime, used_at)
