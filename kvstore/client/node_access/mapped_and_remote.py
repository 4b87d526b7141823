"""Reads of one node's objects without a lease: from its mapped memory, or with one-sided READs.

Only committed and whole objects are returned; each must match its checksum, unless the caller skips verification of
mapped memory.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import xxhash

from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.inline_client import GET_BYTES, GET_KEYS, Found, InlineClient, NotOffered
from moonserve.kvstore.client.node_access.objects import LeasedObject, ReadMiss, too_small, wrong_length
from moonserve.kvstore.index_layout import Entry, LocateStatus, NotCopied, Presence
from moonserve.kvstore.published_index import ROW_WORDS, IndexUnknown, MappedReader
from moonserve.protocol.kv_blocks import BlockKey, iter_keys, pack_keys
from moonserve.transfer import Op, RemoteSegment, ScatterTransfer, Segment, Transfer, TransferEngine
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import address_of

_TRIES = 8
"""Attempts to copy an object whose entry keeps changing, before leaving it to the node."""
_WORD = 2**64 - 1
_SENT = LocateStatus.SENT << 32
_MISSES = {
    NotCopied.ABSENT: ReadMiss.ABSENT,
    NotCopied.ON_DISK: ReadMiss.ASK_NODE,
    NotCopied.CHANGED: ReadMiss.ASK_NODE,
    NotCopied.UNKNOWN: ReadMiss.ASK_NODE,
}
_fresh_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_fresh_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_fresh_bytes.restype = ctypes.py_object


class MappedObjects:
    """Mapped index and objects of a node on this host, which is not asked. Thread-safe.

    A copy counts if its entry is the same before and after it (the entry's tag changes whenever the object moves) and
    it matches its checksum, unless the caller skips verification. Every method raises IndexMoved if the index has
    moved. Does not notice the node's death: committed objects stay valid, and the reports of use notice it.
    """

    def __init__(self, index: memoryview, data: memoryview) -> None:
        """Both stay mapped for the lifetime of this object. Raises IndexMoved, Incompatible."""
        self._data = data
        self._reader = MappedReader(index, data)

    def find(self, key: BlockKey) -> Entry | ReadMiss:
        try:
            return self._reader.find(key) or ReadMiss.ABSENT
        except IndexUnknown:
            return ReadMiss.ASK_NODE

    def exist(self, keys: Sequence[BlockKey]) -> list[bool | ReadMiss]:
        """Tells which keys exist; ASK if the index cannot tell."""
        statuses = self._reader.exists(pack_keys(keys))
        return [ReadMiss.ASK_NODE if status == Presence.UNKNOWN else status == Presence.PRESENT for status in statuses]

    def values(self, keys: Sequence[BlockKey], *, verify: bool) -> list[bytes | ReadMiss]:
        return [self.value(key, verify=verify) for key in keys]

    def value(self, key: BlockKey, *, verify: bool) -> bytes | ReadMiss:
        """Returns the bytes of one object, copied once."""
        for _ in range(_TRIES):
            entry = self.find(key)
            if isinstance(entry, ReadMiss):
                return entry
            if entry.offset is None:
                return ReadMiss.ASK_NODE
            value = self._copied(key, entry.length, verify=verify)
            if value is not None:
                return value
        return ReadMiss.ASK_NODE

    def _copied(self, key: BlockKey, length: int, *, verify: bool) -> bytes | ReadMiss | None:
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
            return _MISSES[NotCopied(status)]
        return ReadMiss.CORRUPT if verify and xxhash.xxh3_64_intdigest(value) != int(copied.checksums[0]) else value

    def into(self, packed_keys: bytes, slots: BufferSlots, *, verify: bool) -> list[int | ReadMiss]:
        """Reads objects into their slots and returns the lengths. Keys have 16 bytes, back to back.

        Raises InvalidRequest for an object that does not fit.
        """
        copied = self._reader.copy(packed_keys, slots.addresses, slots.capacities)
        lengths: list[int] = copied.lengths.tolist()
        if not verify and min(lengths, default=0) >= 0:
            return cast("list[int | ReadMiss]", lengths)
        checksums: list[int] = copied.checksums.tolist()
        return [
            self._length_or_miss(key, slots, place, length, checksums[place] if verify else None)
            for place, (key, length) in enumerate(zip(iter_keys(packed_keys), lengths, strict=True))
        ]

    def _length_or_miss(
        self, key: BlockKey, slots: BufferSlots, place: int, length: int, checksum: int | None
    ) -> int | ReadMiss:
        if length == NotCopied.TOO_SMALL:
            entry = self.find(key)
            if isinstance(entry, Entry) and entry.length > slots.capacities[place]:
                raise too_small(entry.length, int(slots.capacities[place]))
            return ReadMiss.ASK_NODE
        if length < 0:
            return _MISSES[NotCopied(length)]
        if checksum is None or xxhash.xxh3_64_intdigest(slots.memory(place, length)) == checksum:
            return length
        return ReadMiss.CORRUPT

    def scatter(self, keys: Sequence[BlockKey], slots: BufferSlots) -> list[int | ReadMiss]:
        """Reads objects into slots of several pieces and returns their checksums.

        Hashing many small pieces takes several times as long as hashing the whole object, so the object is hashed in
        the node's memory before it is copied. A mismatch counts only if the copy does not match either. Raises
        InvalidRequest for an object of another length.
        """
        packed = pack_keys(keys)
        digests = self._digests(packed, len(keys))
        copied = self._reader.copy(packed, slots.addresses, slots.capacities)
        lengths, expected = copied.lengths.tolist(), slots.lengths.tolist()
        checksums: list[int] = copied.checksums.tolist()
        if lengths == expected and digests == checksums:
            return list(checksums)
        fates: list[int | ReadMiss] = []
        rows = zip(digests, checksums, lengths, expected, strict=True)
        for place, (digest, checksum, length, room) in enumerate(rows):
            if length == NotCopied.TOO_SMALL or 0 <= length < room:
                raise wrong_length(room)
            if length < 0:
                fates.append(_MISSES[NotCopied(length)])
            elif digest == checksum or slots.checksum(place) == checksum:
                fates.append(checksum)
            else:
                fates.append(ReadMiss.CORRUPT)
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


T = TypeVar("T")
ReadRun = tuple[int, int, int]
"""Remote offset, local offset, length."""
Find = Callable[[Sequence[BlockKey], Deadline], Sequence[Entry | None]]


class RemoteObjects:
    """Thread-safe reader of a node whose memory cannot be mapped. PeerLost and DeadlineExceeded pass through.

    The node says where objects lie, and READs fetch their bytes; small objects come with the answer if the node offers
    inline connections. Only bytes that match the checksum count, since nothing keeps an object in place between the
    answer and the READ. An object that does not match is left to a lease, under which a mismatch means corruption. The
    call for the places costs a fifth of a READ of the index over TCP.
    """

    def __init__(
        self,
        engine: TransferEngine,
        find: Find,
        data: RemoteSegment,
        inline: InlineClient | None = None,
    ) -> None:
        self._engine = engine
        self._find = find
        self._data = data
        self._inline = inline

    def exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool | ReadMiss]:
        """Tells which keys exist; ASK if the node must be asked."""
        found = None
        if len(keys) <= GET_KEYS:
            found = self._inline_get(lambda inline: inline.exist(keys, deadline))
        return [ReadMiss.ASK_NODE] * len(keys) if found is None else found

    def find(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[Entry | ReadMiss]:
        """Returns the node's entry for each key."""
        return [entry or ReadMiss.ABSENT for entry in self._find(keys, deadline)]

    def read(self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline) -> list[int | ReadMiss]:
        """Reads each object into its slot, over an inline connection if offered. Raises InvalidRequest if one does not
        fit."""
        if len(keys) > GET_KEYS:
            first = self.read(keys[:GET_KEYS], slots.at(range(GET_KEYS)), deadline)
            return first + self.read(keys[GET_KEYS:], slots.at(range(GET_KEYS, len(keys))), deadline)
        found = self._inline_get(lambda inline: inline.get(keys, slots, deadline))
        if found is None:
            found = list(self.find(keys, deadline))
        if Entry not in set(map(type, found)):  # faster than a Python loop
            return cast("list[int | ReadMiss]", found)
        entries = {place: each for place, each in enumerate(found) if isinstance(each, Entry)}
        read = iter(self.read_entries([*entries.values()], slots.at([*entries]), deadline))
        return [next(read) if isinstance(each, Entry) else each for each in found]

    def scatter(self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline) -> list[int | ReadMiss]:
        """Reads objects into slots of several pieces and returns their checksums; ASK for all that it cannot read.

        Raises InvalidRequest for an object of another length.
        """
        found = None
        if slots.nbytes <= GET_BYTES and len(keys) <= GET_KEYS:
            found = self._inline_get(lambda inline: inline.scatter(keys, slots, deadline))
        return [ReadMiss.ASK_NODE] * len(keys) if found is None else found

    async def scatter_in_loop(
        self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline
    ) -> list[int | ReadMiss] | None:
        """Does the same as `scatter` in an event loop. Returns None if that needs a thread."""
        if self._inline is None or slots.nbytes > GET_BYTES or len(keys) > GET_KEYS:
            return None
        return await self._inline.scatter_in_loop(keys, slots, deadline)

    def find_or_read(
        self, keys: Sequence[BlockKey], local: Segment, deadline: Deadline
    ) -> tuple[Sequence[Found], BufferSlots]:
        """Reads the values sent with the answer into `local`, which has room for `GET_BYTES`; locates the others."""
        got = self._inline_get(lambda inline: inline.get_packed(keys, local, deadline))
        return got or (self.find(keys, deadline), BufferSlots.packed(local, [0] * len(keys)))

    def _inline_get(self, get: Callable[[InlineClient], T]) -> T | None:
        """Runs `get`. Returns None if the node offers no inline connection."""
        if self._inline is not None:
            try:
                return get(self._inline)
            except NotOffered:
                self._inline = None
        return None

    def read_entries(self, entries: Sequence[Entry], slots: BufferSlots, deadline: Deadline) -> list[int | ReadMiss]:
        """READs each object into its slot. Raises InvalidRequest for an object that does not fit."""
        runs = [
            (entry.offset, int(slots.offsets[place]), fitting_length(entry, slots, place))
            for place, entry in enumerate(entries)
            if entry.offset is not None
        ]
        deadline.extend_for_bytes(sum(nbytes for _, _, nbytes in runs))
        read_runs(self._engine, self._data, slots.segment, runs, deadline)
        return [
            entry.length if entry.offset is not None and matches(entry, slots, place) else ReadMiss.ASK_NODE
            for place, entry in enumerate(entries)
        ]


def fitting_length(entry: Entry | LeasedObject, slots: BufferSlots, place: int) -> int:
    """Returns the length of an object that fits its slot. Raises InvalidRequest for any other."""
    if entry.length > slots.capacities[place]:
        raise too_small(entry.length, int(slots.capacities[place]))
    return entry.length


def read_runs(
    engine: TransferEngine,
    remote: RemoteSegment,
    local: Segment,
    runs: Sequence[ReadRun],
    deadline: Deadline,
) -> None:
    """READs the runs as one batch, in the caller's thread if faster. When it ends, no byte of it moves any more."""
    runs = [run for run in runs if run[2]]
    if not runs:
        return
    if len(runs) == 1:  # the engine has a fast path for a single transfer
        [(offset, at, nbytes)] = runs
        single = Transfer(Op.READ, local, at, remote, offset, nbytes)
        engine.run([single], deadline_s=deadline.left_s())
    else:
        rows = scatter.rows(*runs)
        engine.run([ScatterTransfer(Op.READ, local, remote, rows)], deadline_s=deadline.left_s())


def matches(entry: Entry | LeasedObject, slots: BufferSlots, place: int) -> bool:
    return xxhash.xxh3_64_intdigest(slots.memory(place, entry.length)) == entry.checksum
