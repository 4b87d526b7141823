"""LRU with credit for what somebody came back for, and debt for long runs that nobody has come back for yet.

LRU evicts by age alone: at a capacity below the working set nearly everything goes before its next use comes round,
although some blocks are several times as likely to have one. Two things that a store sees tell them apart. Every use
of a block makes another likelier, since a conversation that went on tends to go on. And a long run of new blocks is
less likely to be continued than a short one (a turn of a conversation), while keeping it displaces more of the others.

So a key's rank is the time of its last use, in uses of the store, moved later by one lifetime for each time that it
was read, and, until it is read, moved earlier by its depth in its run. A *run* is the blocks that were stored behind
one another and not read since; depth is counted from where it leaves what was read, or from the head of its chain. A
*lifetime* is the mean age at which unread victims go, so credit scales with capacity and traffic. Debt scales with the
share of the store that the run takes, so it does not depend on the size of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.eviction.ranked import Ranked
from protocol.keys import BlockKey

MAX_CREDIT = 3
"""Lifetimes. Without a limit what was popular once stays for ever; S3-FIFO counts as far."""
RUN_OF_A_LIFETIME = 1 / 128
"""The share of the resident keys at whose depth a run owes a whole lifetime (measured: docs/store-eviction.md)."""
SMOOTHING = 0.01
"""Of the mean lifetime: about the last hundred unread victims count."""


@dataclass(slots=True, eq=False)
class _Resident:
    run_depth: int  # 1 = the first block of its run
    num_reads: int = 0
    used_at: int = 0  # in uses of the store


class ReuseCredit(Ranked):
    """What was used longest ago goes first, reads and run depth counted as time."""

    name = "reuse-credit"

    def __init__(self) -> None:
        super().__init__()
        self._residents: dict[BlockKey, _Resident] = {}
        self._lifetime = 0.0  # in uses of the store
        self._num_lifetimes = 0  # that the mean was taken of
        self._named: BlockKey | None = None  # the victim, until it is gone

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        before = self._residents.get(parent) if parent is not None else None
        continues = before is not None and not before.num_reads
        depth = before.run_depth + 1 if before is not None and continues else 1
        self._residents[key] = _Resident(depth)
        self._rank(key)

    def used(self, key: BlockKey) -> None:
        self._residents[key].num_reads += 1
        self._rank(key)

    def victim(self) -> BlockKey | None:
        self._named = super().victim()
        return self._named

    def forget(self, key: BlockKey) -> None:
        resident = self._residents.pop(key, None)
        if resident is not None and key == self._named and not resident.num_reads:
            self._learn(self._clock - resident.used_at)
        self._named = None
        super().forget(key)

    def _learn(self, lifetime: int) -> None:
        self._num_lifetimes += 1
        weight = max(SMOOTHING, 1 / self._num_lifetimes)  # a plain mean at first
        self._lifetime += weight * (lifetime - self._lifetime)

    def _rank(self, key: BlockKey) -> None:
        resident = self._residents[key]
        resident.used_at = self._tick()
        if resident.num_reads:
            credit = float(min(resident.num_reads, MAX_CREDIT))
        else:
            share = resident.run_depth / len(self._residents)
            credit = -share / RUN_OF_A_LIFETIME
        self._place(key, (resident.used_at + credit * self._lifetime, resident.used_at))
