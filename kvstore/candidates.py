"""Which visible objects may leave their tier, and how often each was used: kept up to date for the policies. Pure.

An object is on offer while nothing speaks against it: nobody holds it, no block that follows it is resident in its
tier or a slower one, and it is not hard-pinned. Knows neither bytes nor what becomes of the one that is chosen.
"""

from __future__ import annotations

from kvstore.disk.base import Pin
from kvstore.native.base import NO_RECORD, KeyIndex, Record, RecordArray
from kvstore.records import Records
from kvstore.shares import Offers, Share, Shares
from kvstore.stored import Tier
from protocol.keys import BlockKey


class Candidates:
    """The visible objects of one node, as their tenants' policies see them."""

    def __init__(self, rows: Records, index: KeyIndex, shares: Shares) -> None:
        self._rows = rows
        self._index = index
        self._shares = shares

    def tier(self, record: Record) -> Tier:
        return Tier.MEMORY if self._rows.in_memory(record) else Tier.DISK

    def share(self, record: Record) -> Share:
        return self._shares.of(self._rows.tenants[record])

    def join(self, record: Record, key: BlockKey, parent: BlockKey | None) -> None:
        """It is new in the tier of its fastest copy."""
        before = NO_RECORD if parent is None else self._index.record_of(parent)
        if before != NO_RECORD and self.tier(before) is not self.tier(record):
            before = NO_RECORD  # another instance of the policy knows it
        self._offers(record).policy.added(record, key, before)
        self.reconsider(record)

    def leave(self, record: Record) -> None:
        """It leaves the tier that its row still names."""
        self._offers(record).forget(record)

    def used(self, record: Record) -> None:
        self._offers(record).policy.used(record)

    def used_all(self, records: RecordArray) -> None:
        """As `used` for each in order, as far as it matters: policies know nothing of each other."""
        in_memory = self._rows.in_memory_all(records)
        for share, is_its in self._shares.apart(self._rows.tenants_all(records)):
            for tier, is_there in ((Tier.MEMORY, in_memory), (Tier.DISK, ~in_memory)):
                used = records[is_its & is_there]
                if len(used):
                    share.offers[tier].policy.used_all(used)

    def reconsider(self, record: Record) -> None:
        """Offers it if nothing speaks against that, withdraws it otherwise."""
        rows, pin = self._rows, self._rows.pin(record)
        in_memory = rows.in_memory(record)
        followers = rows.followers_in_memory[record] if in_memory else rows.followers[record]
        if rows.holds[record] or followers or pin is Pin.HARD:
            self.withdraw(record)
        else:
            self._offers(record).offer(record, pin)

    def withdraw(self, record: Record) -> None:
        self._offers(record).withdraw(record)

    def _offers(self, record: Record) -> Offers:
        return self.share(record).offers[self.tier(record)]
