"""Reads from a node on this host, whose index and objects are mapped, without asking the node.

Only committed and whole objects are returned. A copy counts if its entry is the same before and after it (the entry's
tag changes whenever the object moves) and it matches its checksum, unless the caller skips verification. Every method
of `Near` raises Retired if the index has moved. Does not notice the node's death: committed objects stay valid, and the
reports of use notice it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import xxhash

from kvstore.client.objects import Fate, too_small, wrong_length
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from kvstore.native.layout import NotCopied, Presence, Standing
from kvstore.native.reader import ROW_WORDS, MappedReader, Unknown
from protocol.keys import BlockKey, iter_keys, pack_keys
from transfer.native import address_of

_TRIES = 8
"""Attempts to copy an object whose entry keeps changing, before leaving it to the node."""
_WORD = 2**64 - 1
_SENT = Standing.SENT << 32
_FATES = {
    NotCopied.ABSENT: Fate.ABSENT,
    NotCopied.ON_DISK: Fate.ASK,
    NotCopied.CHANGED: Fate.ASK,
    NotCopied.UNKNOWN: Fate.ASK,
}
_fresh_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_fresh_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_fresh_bytes.restype = ctypes.py_object


class Near:
    """Mapped index and objects of one node. Thread-safe."""

    def __init__(self, index: memoryview, data: memoryview) -> None:
        """Both stay mapped for the lifetime of this object. Raises Retired, Incompatible."""
        self._data = data
        self._reader = MappedReader(index, data)

    def find(self, key: BlockKey) -> Entry | Fate:
        try:
            return self._reader.find(key) or Fate.ABSENT
        except Unknown:
            return Fate.ASK

    def exist(self, keys: Sequence[BlockKey]) -> list[bool | Fate]:
        """Tells which keys exist; ASK if the index cannot tell."""
        statuses = self._reader.exists(pack_keys(keys))
        return [Fate.ASK if status == Presence.UNKNOWN else status == Presence.PRESENT for status in statuses]

    def values(self, keys: Sequence[BlockKey], *, verify: bool) -> list[bytes | Fate]:
        return [self.value(key, verify=verify) for key in keys]

    def value(self, key: BlockKey, *, verify: bool) -> bytes | Fate:
        """Returns the bytes of one object, copied once."""
        for _ in range(_TRIES):
            entry = self.find(key)
            if isinstance(entry, Fate):
                return entry
            if entry.offset is None:
                return Fate.ASK
            value = self._copied(key, entry.length, verify=verify)
            if value is not None:
                return value
        return Fate.ASK

    def _copied(self, key: BlockKey, length: int, *, verify: bool) -> bytes | Fate | None:
        """Returns None if the object was replaced meanwhile."""
        # Python's C API allows filling a new bytes object before anything else refers to it. Every other way copies
        # twice.
        value: bytes = _fresh_bytes(None, length)
        address = np.array([address_of(value)], np.uint64)
        copied = self._reader.copy(key, address, np.array([length], np.uint64))
        status = int(copied.lengths[0])
        if status == NotCopied.TOO_SMALL or 0 <= status < length:
            return None
        if status < 0:
            return _FATES[NotCopied(status)]
        if verify and xxhash.xxh3_64_intdigest(value) != int(copied.checksums[0]):
            return Fate.CORRUPT
        return value

    def into(self, packed_keys: bytes, spots: Spots, *, verify: bool) -> list[int | Fate]:
        """Reads objects into their spots and returns the lengths. Keys have 16 bytes, back to back.

        Raises InvalidRequest for an object that does not fit.
        """
        copied = self._reader.copy(packed_keys, spots.addresses, spots.rooms)
        lengths: list[int] = copied.lengths.tolist()
        if not verify and min(lengths, default=0) >= 0:
            return cast("list[int | Fate]", lengths)
        checksums: list[int] = copied.checksums.tolist()
        return [
            self._judged(key, spots, place, length, checksums[place] if verify else None)
            for place, (key, length) in enumerate(zip(iter_keys(packed_keys), lengths, strict=True))
        ]

    def _judged(self, key: BlockKey, spots: Spots, place: int, length: int, checksum: int | None) -> int | Fate:
        if length == NotCopied.TOO_SMALL:
            entry = self.find(key)
            if isinstance(entry, Entry) and entry.length > spots.rooms[place]:
                raise too_small(entry.length, int(spots.rooms[place]))
            return Fate.ASK
        if length < 0:
            return _FATES[NotCopied(length)]
        if checksum is None or xxhash.xxh3_64_intdigest(spots.memory(place, length)) == checksum:
            return length
        return Fate.CORRUPT

    def scatter(self, keys: Sequence[BlockKey], spots: Spots) -> list[int | Fate]:
        """Reads objects into spots of several pieces and returns their checksums.

        Hashing many small pieces takes several times as long as hashing the whole object, so the object is hashed in
        the node's memory before it is copied. A mismatch counts only if the copy does not match either. Raises
        InvalidRequest for an object of another length.
        """
        packed = pack_keys(keys)
        digests = self._digests(packed, len(keys))
        copied = self._reader.copy(packed, spots.addresses, spots.rooms)
        lengths, expected = copied.lengths.tolist(), spots.lengths.tolist()
        checksums: list[int] = copied.checksums.tolist()
        if lengths == expected and digests == checksums:
            return list(checksums)
        fates: list[int | Fate] = []
        rows = zip(digests, checksums, lengths, expected, strict=True)
        for place, (digest, checksum, length, room) in enumerate(rows):
            if length == NotCopied.TOO_SMALL or 0 <= length < room:
                raise wrong_length(room)
            if length < 0:
                fates.append(_FATES[NotCopied(length)])
            elif digest == checksum or spots.checksum(place) == checksum:
                fates.append(checksum)
            else:
                fates.append(Fate.CORRUPT)
        return fates

    def _digests(self, packed_keys: bytes, count: int) -> list[int | None]:
        """Hashes each object in place; None if it is not in memory."""
        rows = np.zeros((count, ROW_WORDS), np.uint64)
        pieces = np.empty((count, 2), np.uint64)
        rooms = np.full(count, _WORD, np.uint64)
        self._reader.locate(packed_keys, rooms, _WORD, rows, pieces)
        data, digest = self._data, xxhash.xxh3_64_intdigest
        return [
            digest(data[offset : offset + extent - _SENT]) if extent >> 32 == _SENT >> 32 else None
            for offset, extent in rows[:, :2].tolist()
        ]

    def view(self, offset: int, length: int) -> memoryview:
        """Returns a view of the node's memory, valid under a lease."""
        return self._data[offset : offset + length]
