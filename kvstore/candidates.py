"""Which visible objects may leave their tier, and how often each was used: kept up to date for the policies. Pure.

An object is on offer while nothing speaks against it: nobody holds it, no block that follows it is resident in its
tier or a slower one, and it is not hard-pinned. Knows neither bytes nor what becomes of the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.disk.base import Pin
from kvstore.native.base import NO_RECORD, Record, RecordArray
from kvstore.native.metadata import KeyIndex
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


class Followers:
    """How many resident blocks name each block as their parent, whether that one is resident or not.

    Counts in the rows of visible blocks; apart from them for parents that are absent or still being written.
    """

    def __init__(self, rows: Records, index: KeyIndex) -> None:
        self._rows = rows
        self._index = index
        self._of_absent: dict[BlockKey, tuple[int, int]] = {}  # in all, in memory

    def count(
        self,
        parent: BlockKey | None,
        change: int,
        change_in_memory: int,
        changed: Callable[[Record], None],
    ) -> None:
        """So many more (or fewer) blocks follow `parent`; `changed` is told its record when it is visible."""
        if parent is None:
            return
        record = self._index.record_of(parent)
        if record == NO_RECORD:
            total, in_memory = self._of_absent.get(parent, (0, 0))
            self._set_absent(parent, total + change, in_memory + change_in_memory)
            return
        self._rows.followers[record] += change
        self._rows.followers_in_memory[record] += change_in_memory
        changed(record)

    def arrive(self, key: BlockKey, record: Record) -> None:
        """`key` becomes visible as `record`, whose row is new."""
        total, in_memory = self._of_absent.pop(key, (0, 0))
        self._rows.followers[record] = total
        self._rows.followers_in_memory[record] = in_memory

    def leave(self, key: BlockKey, record: Record) -> None:
        """`key` is no longer visible; its row still stands."""
        total, in_memory = self._rows.followers[record], self._rows.followers_in_memory[record]
        self._set_absent(key, total, in_memory)

    def _set_absent(self, key: BlockKey, total: int, in_memory: int) -> None:
        if total:
            self._of_absent[key] = (total, in_memory)
        else:
            self._of_absent.pop(key, None)

    def validate(self, expected: Iterable[tuple[BlockKey, bool]]) -> None:
        """Raises AssertionError unless exactly these blocks (parent, in memory) are counted."""
        counts: dict[BlockKey, tuple[int, int]] = {}
        for parent, in_memory in expected:
            total, among = counts.get(parent, (0, 0))
            counts[parent] = (total + 1, among + in_memory)
        for parent, counted in counts.items():
            record = self._index.record_of(parent)
            if record == NO_RECORD:
                assert self._of_absent.get(parent) == counted, "followers of an absent block"
            else:
                rows = self._rows
                assert (rows.followers[record], rows.followers_in_memory[record]) == counted
        absent = {key for key in counts if self._index.record_of(key) == NO_RECORD}
        assert set(self._of_absent) == absent
