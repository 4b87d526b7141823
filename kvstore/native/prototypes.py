"""Prototypes of the compiled functions, and the structures they share with Python. Does not know what they do."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from protocol.native import C_FLAGS, load_library, shared_cache

METADATA_SOURCE = Path(__file__).with_name("metadata.c")
HEAP_SOURCE = Path(__file__).with_name("rank_heap.c")
_pointer, _double = ctypes.c_void_p, ctypes.c_double
_int64, _uint64 = ctypes.c_int64, ctypes.c_uint64
_int32, _uint32 = ctypes.c_int32, ctypes.c_uint32


class Table(ctypes.Structure):
    """An index whose bounds were checked (`Table` of metadata.c)."""

    _fields_ = (
        ("header", _pointer),
        ("slots", _pointer),
        ("num_slots", _uint64),
        ("num_all", _uint64),
        ("seed", _uint64),
    )


class Mapping(ctypes.Structure):
    """An index and the memory of its objects (`Mapping` of metadata.c)."""

    _fields_ = (("index", Table), ("data", _pointer), ("data_bytes", _uint64))


class HeapState(ctypes.Structure):
    """A heap and its columns (`Heap` of rank_heap.c)."""

    _fields_ = (
        ("records", _pointer),
        ("positions", _pointer),
        ("secondaries", _pointer),
        ("primaries", _pointer),
        ("count", _uint64),
        ("room", _uint64),
        ("num_records", _uint64),
    )
    count: int
    room: int
    num_records: int


Function = Callable[..., int]


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> Function:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


def _load(source: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Loads a library twice: for long calls, which release the GIL, and for calls too short to be worth that.

    Raises CompilerError.
    """
    library = load_library(source, C_FLAGS, shared_cache())
    return library, ctypes.PyDLL(library._name, handle=library._handle)


class MetadataLibrary:
    """The functions of metadata.c."""

    def __init__(self) -> None:
        long, short = _load(METADATA_SOURCE)
        fields = _uint64, _uint64, _uint32, _uint32, _uint32
        self.index_find = _function(short, "index_find", _int32, _pointer, _pointer, _pointer)
        records = "index_records", None, _pointer, _pointer, _int64, _pointer
        self.index_records = _function(short, *records)
        self.index_records_unlocked = _function(long, *records)
        self.index_insert = _function(short, "index_insert", _int32, _pointer, _pointer, *fields)
        self.index_relocate = _function(short, "index_relocate", _int32, _pointer, _pointer, _uint32)
        self.index_remove = _function(short, "index_remove", _int32, _pointer, _pointer)
        self.index_move = _function(long, "index_move", _int32, _pointer, _pointer)
        self.index_retire = _function(short, "index_retire", None, _pointer)
        self.index_check = _function(long, "index_check", _int64, _pointer)
        self._declare_reader(long, short)

    def _declare_reader(self, long: ctypes.CDLL, short: ctypes.CDLL) -> None:
        batch = _pointer, _pointer, _int64
        self.reader_find = _function(short, "reader_find", _int32, _pointer, _pointer, _pointer)
        self.reader_exists = _function(long, "reader_exists", _int32, *batch, _pointer)
        self.reader_copy = _function(long, "reader_copy", _int32, *batch, _int64, *5 * (_pointer,))
        self.reader_locate = _function(
            long, "reader_locate", _int64, *3 * (_pointer,), _int64, _uint64, *2 * (_pointer,)
        )


class HeapLibrary:
    """The functions of rank_heap.c."""

    def __init__(self) -> None:
        long, short = _load(HEAP_SOURCE)
        self.heap_rank = _function(short, "heap_rank", _int32, _pointer, _uint32, _double, _uint64)
        self.heap_rank_all = _function(long, "heap_rank_all", None, _pointer, _pointer, _int64, _uint64)
        self.heap_offer = _function(short, "heap_offer", _int32, _pointer, _uint32)
        self.heap_discard = _function(short, "heap_discard", None, _pointer, _uint32)


@functools.cache
def metadata_library() -> MetadataLibrary:
    """Returns the library of this process. It is code without state, so it is loaded once, like a module.

    The first call on a machine runs the compiler; a node makes it when it starts.
    """
    return MetadataLibrary()


@functools.cache
def heap_library() -> HeapLibrary:
    """Returns the library of this process, like `metadata_library`."""
    return HeapLibrary()
