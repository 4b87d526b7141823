"""Reads of a node on this host: its index and its objects are mapped here, so nobody needs to be asked.

Its rule: what is given was committed and is whole. A copy counts when its entry is the same before and after it, and
matches its checksum unless the caller does without. Every method raises Retired when the index has moved. Does not
notice that the node has died: what it committed stays right, and the reports of use tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import xxhash

from kvstore.client.fate import Fate, too_small
from kvstore.client.index_run import Found, look, unchanged
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from kvstore.native.layout import HEADER, Geometry
from kvstore.native.lookups import NotCopied, Presence
from kvstore.native.reader import MappedReader, Unknown, slots_of
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey, iter_keys, pack_keys
from transfer.native import address_of

_TRIES = 8
"""An entry that changes this often while it is copied is left to its node."""
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
    """May be used by several threads."""

    def __init__(self, index: memoryview, data: memoryview) -> None:
        """Both mapped, for as long as this lives. Raises Retired, Incompatible."""
        self._index = index
        self._data = data
        self._geometry = Geometry.parse(index[: HEADER.size], len(index))
        self._reader = MappedReader(index, data)

    def find(self, key: BlockKey) -> Entry | Fate:
        try:
            return self._reader.find(key) or Fate.ABSENT
        except Unknown:
            return Fate.ASK

    def exist(self, keys: Sequence[BlockKey]) -> list[bool | Fate]:
        """ASK where it cannot be told."""
        statuses = self._reader.exists(pack_keys(keys))
        return [
            Fate.ASK if status == Presence.UNKNOWN else status == Presence.PRESENT
            for status in statuses
        ]

    def values(self, keys: Sequence[BlockKey], *, verify: bool) -> list[bytes | Fate]:
        return [self.value(key, verify=verify) for key in keys]

    def value(self, key: BlockKey, *, verify: bool) -> bytes | Fate:
        """The bytes of one object, copied once."""
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
        """None: it is another object by now."""
        # Python's C API lets its maker fill new bytes before anybody else has them; all other ways copy twice.
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
        """Length of each object that lies in its spot now; keys of 16 bytes, back to back.

        Raises InvalidRequest for one that does not fit.
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

    def _judged(
        self, key: BlockKey, spots: Spots, place: int, length: int, checksum: int | None
    ) -> int | Fate:
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

    def part(self, key: BlockKey, offset: int, length: int) -> bytes | Fate:
        """Bytes from the midst of an object; no checksum covers them alone. Raises InvalidRequest: out of bounds."""
        for _ in range(_TRIES):
            found = self._look(key)
            if isinstance(found, Fate):
                return found
            require_within(found.entry, offset, length)
            if found.entry.offset is None:
                return Fate.ASK
            start = found.entry.offset + offset
            value = bytes(self._data[start : start + length])
            if len(value) == length and unchanged(found, self._run(key), key):
                Geometry.parse(
                    self._index[: HEADER.size], len(self._index)
                )  # not retired meanwhile
                return value
        return Fate.ASK

    def view(self, offset: int, length: int) -> memoryview:
        """In place, to be used under a lease."""
        return self._data[offset : offset + length]

    def _look(self, key: BlockKey) -> Found | Fate:
        found = look(self._run(key), key)
        if found is Fate.ABSENT:  # only a hint
            return Fate.ABSENT if self.find(key) is Fate.ABSENT else Fate.ASK
        return found

    def _run(self, key: BlockKey) -> bytes:
        offset, nbytes = slots_of(self._geometry, key)
        return bytes(self._index[offset : offset + nbytes])


def require_within(entry: Entry, offset: int, length: int) -> None:
    """Raises InvalidRequest."""
    if offset < 0 or length < 0 or offset + length > entry.length:
        raise InvalidRequest(
            f"{length} bytes at {offset} are not within a value of {entry.length} bytes",
            param="offset",
        )
