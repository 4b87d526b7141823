"""The visible objects of a node, put together from what its index and its rows say. Pure; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.disk.base import Place
from kvstore.native.base import NO_RECORD, Entry, KeyIndex
from kvstore.records import Records
from kvstore.shares import Shares
from kvstore.stored import StoredObject
from protocol.keys import BlockKey


class Visible:
    """Snapshots by key."""

    def __init__(self, rows: Records, index: KeyIndex, shares: Shares) -> None:
        self._rows = rows
        self._index = index
        self._shares = shares

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[StoredObject]:
        """Nothing may change meanwhile, except between two `next` of a slow reader: then objects that come or go may
        be missed, and one that comes again be given twice."""
        for record in range(len(self._rows.holds)):
            key = self._rows.key(record)
            entry = self._index.find(key)
            if entry is not None and entry.record == record:
                yield self._stored(key, entry)

    def entry(self, key: BlockKey) -> Entry | None:
        return self._index.find(key)

    def find(self, key: BlockKey) -> StoredObject | None:
        entry = self._index.find(key)
        return None if entry is None else self._stored(key, entry)

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [record != NO_RECORD for record in self._index.records_of(keys)]

    def _stored(self, key: BlockKey, entry: Entry) -> StoredObject:
        rows, record = self._rows, entry.record
        stored = StoredObject(key, rows.parent(record), entry.length, entry.generation)
        stored.tenant = self._shares.name(rows.tenants[record])
        stored.pin = rows.pin(record)
        stored.checksum = entry.checksum
        stored.offset = entry.offset
        stored.place = Place(rows.places[record]) if rows.on_disk(record) else None
        stored.record = record
        return stored
