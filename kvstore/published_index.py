"""Index of a node's objects, which other processes map or READ while the node changes it.

Python owns the memory and checks the bounds of all memory whose address is passed to C; C changes and reads it
(`native/published_index.c`). `KeyIndex` is the owner's side, in segments of the transfer engine (`IndexSegments`);
`MappedReader` reads another process's index.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moonserve.kvstore.index_layout import (
    HEADER,
    SLOT,
    Addresses,
    Allocate,
    CopyResult,
    Entry,
    Geometry,
    IndexMoved,
    Presence,
    Record,
    RecordArray,
    Retire,
    anonymous_memory,
    check_entry,
    check_key,
    check_keys,
    entry_of,
    to_offset_units,
)
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.process.native_libraries import C_FLAGS, c_fields, load_library, shared_cache
from moonserve.transfer import Segment, TransferEngine
from moonserve.transfer.memory.data_plane import address_of

log = logging.getLogger(__name__)

INDEX_SOURCE = Path(__file__).parent / "native" / "published_index.c"
_pointer = ctypes.c_void_p
_int64, _uint64 = ctypes.c_int64, ctypes.c_uint64
_int32, _uint32 = ctypes.c_int32, ctypes.c_uint32


class IndexTable(ctypes.Structure):
    """An index whose bounds were checked (`IndexTable` of published_index.c)."""

    _fields_ = (
        *c_fields(_pointer, "header slots"),
        *c_fields(_uint64, "num_slots num_all seed"),
    )


class MappedIndex(ctypes.Structure):
    """An index and the memory of its objects (`MappedIndex` of published_index.c)."""

    _fields_ = (("index", IndexTable), ("data", _pointer), ("data_bytes", _uint64))


Function = Callable[..., int]


def bind_function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Function:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


def load_with_and_without_gil(source: Path) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Loads a library twice: for long calls, which release the GIL, and for calls too short to be worth that.

    Raises CompilerError.
    """
    library = load_library(source, C_FLAGS, shared_cache())
    return library, ctypes.PyDLL(library._name, handle=library._handle)


class IndexLibrary:
    """The functions of published_index.c. They are code without state, so each process loads them once, like a module.

    The first one on a machine runs the compiler; a node makes it when it starts.
    """

    def __init__(self) -> None:
        long, short = load_with_and_without_gil(INDEX_SOURCE)
        fields = _uint64, _uint64, _uint32, _uint32, _uint32
        self.index_find = bind_function(short, "index_find", _int32, _pointer, _pointer, _pointer)
        records = "index_records", None, _pointer, _pointer, _int64, _pointer
        self.index_records = bind_function(short, *records)
        self.index_records_unlocked = bind_function(long, *records)
        self.index_insert = bind_function(short, "index_insert", _int32, _pointer, _pointer, *fields)
        self.index_relocate = bind_function(short, "index_relocate", _int32, _pointer, _pointer, _uint32)
        self.index_remove = bind_function(short, "index_remove", _int32, _pointer, _pointer)
        self.index_move = bind_function(long, "index_move", _int32, _pointer, _pointer)
        self.index_retire = bind_function(short, "index_retire", None, _pointer)
        self.index_check = bind_function(long, "index_check", _int64, _pointer)
        batch = _pointer, _pointer, _int64
        self.reader_find = bind_function(short, "reader_find", _int32, _pointer, _pointer, _pointer)
        self.reader_exists = bind_function(long, "reader_exists", _int32, *batch, _pointer)
        self.reader_copy = bind_function(long, "reader_copy", _int32, *batch, _int64, *5 * (_pointer,))
        self.reader_locate = bind_function(
            long, "reader_locate", _int64, *3 * (_pointer,), _int64, _uint64, *2 * (_pointer,)
        )
        self.reader_locate_at = ctypes.cast(long.reader_locate, _pointer).value
        """Address of `reader_locate`, for other compiled code."""


index_library = functools.cache(IndexLibrary)


def table_over(memory: memoryview, geometry: Geometry) -> IndexTable:
    """Returns the C structure of an index. The caller keeps `memory` alive."""
    at = address_of(memory)
    return IndexTable(at, at + HEADER.size, geometry.num_slots, geometry.num_all, geometry.seed)


class KeyIndex:
    """Hash table of visible objects by key. Other processes map or READ its memory while the owner changes it.

    The owner is one thread. Readers see each entry as it was before or after a change, never in between. Mapped readers
    find every entry that is present throughout their search; a one-sided READ may miss it, and then asks the owner.
    """

    def __init__(self, allocate: Allocate = anonymous_memory, retire: Retire = lambda memory: None) -> None:
        """Takes memory from `allocate` and passes outgrown memory to `retire`; by default it is freed with its last
        reference. Raises CompilerError."""
        self._library = index_library()
        self._allocate, self._retire = allocate, retire
        self._found = ctypes.create_string_buffer(SLOT.size)
        self._one = (ctypes.c_int64 * 1)()
        self._settle(*self._make(Geometry.starting()))

    @property
    def memory(self) -> memoryview:
        """Memory that peers map or READ. It changes when the index grows."""
        return self._memory

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return len(self._memory)

    def __len__(self) -> int:
        return int(HEADER.unpack_from(self._memory)[6])

    def insert(self, key: BlockKey, entry: Entry) -> None:
        """Inserts `key`, which must be absent. May move the index to larger memory."""
        check_key(key)
        check_entry(entry)
        fields = entry.checksum, entry.generation, entry.record, to_offset_units(entry.offset)
        while not (done := self._library.index_insert(self._at, key, *fields, entry.length)):
            self._grow()
        assert done > 0, "the key is there already"

    def find(self, key: BlockKey) -> Entry | None:
        check_key(key)
        if not self._library.index_find(self._at, key, self._found):
            return None
        return entry_of(SLOT.unpack(self._found))

    def record_of(self, key: BlockKey) -> Record:
        """Returns the record of `key`; NO_RECORD if it is absent."""
        check_key(key)
        self._library.index_records(self._at, key, 1, self._one)
        return self._one[0]

    def records_in(self, packed_keys: bytes) -> RecordArray:
        """Returns the record of each packed key, NO_RECORD for absent ones. One call of C, which releases the GIL."""
        count = check_keys(packed_keys)
        records = np.empty(count, np.int64)
        self._library.index_records_unlocked(self._at, packed_keys, count, address_of(records))
        return records

    def relocate(self, key: BlockKey, offset: int | None) -> None:
        """Changes the offset of `key`, which must be present. Readers that are copying from the old place notice it."""
        check_key(key)
        found = self._library.index_relocate(self._at, key, to_offset_units(offset))
        assert found, "the key is not there"

    def remove(self, key: BlockKey) -> None:
        """Removes `key`, which must be present. Readers that start later do not find it; readers that are copying it
        notice."""
        check_key(key)
        found = self._library.index_remove(self._at, key)
        assert found, "the key is not there"

    def validate(self) -> None:
        """Raises AssertionError unless every entry can be found and the count is right."""
        assert self._library.index_check(self._at) == len(self)

    def _make(self, geometry: Geometry) -> tuple[memoryview, Geometry]:
        memory = self._allocate(geometry.nbytes)
        memory[: HEADER.size] = geometry.header()
        return memory, geometry

    def _settle(self, memory: memoryview, geometry: Geometry) -> None:
        self._memory, self._geometry = memory, geometry
        self._table = table_over(memory, geometry)
        self._at = ctypes.addressof(self._table)

    def _grow(self) -> None:
        old, old_table = self._memory, self._table
        geometry = self._geometry.grown()
        while not self._move(*self._make(geometry)):
            geometry = geometry.grown()
        self._library.index_retire(ctypes.addressof(old_table))
        self._retire(old)

    def _move(self, memory: memoryview, geometry: Geometry) -> bool:
        """Moves all entries to larger memory. Returns False if entries would run over its end."""
        table = table_over(memory, geometry)
        if not self._library.index_move(ctypes.addressof(table), self._at):
            self._retire(memory)
            return False
        self._settle(memory, geometry)
        return True


_ALIGNMENT = 8
_FOUND, _INDEX_MOVED = 1, 3
ROW_WORDS = 4
"""Words per row of `MappedReader.locate`."""


class IndexUnknown(Exception):
    """The index kept changing, or its owner stopped in the middle of a change. Ask the owner."""


class MappedReader:
    """Reads an index and its owner's data, both mapped here, read-only or not. One call of C per batch; calls that may
    be long release the GIL. Thread-safe. Keeps the memory alive that it reads.

    An entry is valid if its tag fits; its absence, if nothing changed meanwhile; copied bytes, if their object was
    there before and after the copy. A result that cannot be determined in bounded time is "unknown", and the caller
    asks the owner. Bounds are checked here, whatever the memory says. Every call raises IndexMoved if the index has
    moved; then create a reader over its new memory.
    """

    def __init__(self, index_memory: memoryview, data_memory: memoryview) -> None:
        """Raises IndexMoved if the index has moved, Incompatible if the memory is not an index."""
        geometry = Geometry.parse(index_memory[: HEADER.size], len(index_memory))
        if address_of(index_memory) % _ALIGNMENT:
            raise ValueError(f"the index must be mapped at a multiple of {_ALIGNMENT} bytes")
        self._library = index_library()
        self._memories = index_memory, data_memory
        data = address_of(data_memory) if len(data_memory) else 0
        self._mapping = MappedIndex(table_over(index_memory, geometry), data, len(data_memory))
        self.mapping_at = ctypes.addressof(self._mapping)
        """Address of the C structure of both memories, valid while this object lives."""

    def find(self, key: BlockKey) -> Entry | None:
        """Returns the entry of `key`; None if it is absent. Raises IndexUnknown."""
        check_key(key)
        found = ctypes.create_string_buffer(SLOT.size)
        status = self._library.reader_find(self.mapping_at, key, found)
        if status == _INDEX_MOVED:
            raise IndexMoved
        if status == Presence.UNKNOWN:
            raise IndexUnknown
        return entry_of(SLOT.unpack(found)) if status == _FOUND else None

    def exists(self, packed_keys: bytes) -> bytes:
        """Returns a `Presence` byte per key."""
        count = check_keys(packed_keys)
        statuses = ctypes.create_string_buffer(count)
        if not self._library.reader_exists(self.mapping_at, packed_keys, count, statuses):
            raise IndexMoved
        return statuses.raw

    def copy(self, packed_keys: bytes, addresses: Addresses, capacities: Addresses) -> CopyResult:
        """Copies each object that is in memory to its address, if its capacity is sufficient.

        Shape of both arrays: (keys,), or (keys, pieces) to fill the pieces of an object one after another. The copied
        bytes are only valid where a length is returned. Addresses are not checked.
        """
        count = check_keys(packed_keys)
        for array in (addresses, capacities):
            if len(array) != count or array.shape != addresses.shape or array.dtype != np.uint64:
                raise ValueError(f"{count} keys need as many uint64 addresses and capacities")
        into = CopyResult(np.empty((3, count), np.int64))
        if not (addresses.flags.c_contiguous and capacities.flags.c_contiguous):
            addresses, capacities = map(np.ascontiguousarray, (addresses, capacities))
        rows, pieces = address_of(into.rows), addresses.size // count if count else 0
        places = pieces, address_of(addresses), address_of(capacities)
        outcomes = rows, rows + 8 * count, rows + 16 * count
        if not self._library.reader_copy(self.mapping_at, packed_keys, count, *places, *outcomes):
            raise IndexMoved
        return into

    def locate(self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses) -> int:
        """Locates objects, and lists the memory of those that fit. Returns the number of `pieces`.

        `rooms` limits the bytes of each object, `budget` the bytes of all pieces. Fills `rows`, shape (keys, 4):
        offset, length with `Standing`, checksum, generation; and `pieces`, shape (keys, 2): address and length, in
        order, without empty ones. The objects are not held: bytes read from the pieces are only valid if they match
        the checksum.
        """
        count = check_keys(packed_keys)
        if rooms.shape != (count,) or rows.shape != (count, ROW_WORDS) or pieces.shape != (count, 2):
            raise ValueError(f"{count} keys need as many rooms, rows and pieces")
        if any(a.dtype != np.uint64 or not a.flags.c_contiguous for a in (rooms, rows, pieces)):
            raise ValueError("rooms, rows and pieces must be contiguous uint64")
        asked = packed_keys, address_of(rooms), count, budget
        places = address_of(rows), address_of(pieces)
        num_pieces = self._library.reader_locate(self.mapping_at, *asked, *places)
        if num_pieces < 0:
            raise IndexMoved
        return num_pieces


RETIRED_S = 10.0


class IndexSegments:
    """The segments of one `KeyIndex`, which takes `allocate` and `retire`. A growing index takes a new one.

    A retired segment is kept for a while, so that a reader in the middle of it learns from its header instead of from
    an error.
    """

    def __init__(self, transfer: TransferEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._transfer = transfer
        self._clock = clock
        self._segment: Segment | None = None
        self._retired: list[tuple[float, Segment]] = []

    @property
    def segment_id(self) -> int:
        """Id of the segment in use."""
        assert self._segment is not None
        return self._segment.segment_id

    def allocate(self, nbytes: int) -> memoryview:
        """Allocates zeroed memory for an index, which becomes the segment in use."""
        if self._segment is not None:
            self._retired.append((self._clock() + RETIRED_S, self._segment))
        self._segment = self._transfer.allocate(nbytes, readable=True, name="index")
        return self._segment.buffer

    def retire(self, memory: memoryview) -> None:
        """Deregisters segments that were retired RETIRED_S ago. `memory`, now retired, is no longer written to."""
        now = self._clock()
        due = [segment for at, segment in self._retired if at <= now]
        self._retired = [(at, segment) for at, segment in self._retired if at > now]
        for segment in due:
            try:
                self._transfer.deregister(segment)
            except InvalidRequest as error:  # the engine is closing
                log.info("an index segment cannot be deregistered: %s", error)
