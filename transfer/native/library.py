"""The data plane in C: loading it, and calling it with numpy's memory."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import numpy as np

from protocol.native import CompilerError, load_library, shared_cache
from transfer.native.base import DataPlane, End, Flow, FlowState, IoVectors, address_of
from transfer.native.twin import PythonDataPlane
from transfer.rows import Rows

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("data_plane.c")
FLAGS = ("-std=gnu11", "-O2", "-fvisibility=hidden")
_ENDS = {int(end): end for end in End}


@functools.cache
def data_plane() -> DataPlane:
    """The one of this process: code, like an imported module, so it is loaded once and has no state.

    The first call on a machine takes as long as the compiler does; an engine makes it when it starts.
    """
    try:
        return NativeDataPlane(shared_cache())
    except CompilerError as error:
        _log.warning("the compiled data plane is not available, using Python: %s", error)
        return PythonDataPlane()


class NativeDataPlane:
    """`DataPlane` over `data_plane.c`. Raises CompilerError where it cannot be had."""

    name = "native"

    def __init__(self, folder: Path | None) -> None:
        library = load_library(SOURCE, FLAGS, folder)
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._copy_rows = library.copy_rows
        self._copy_rows.argtypes = [pointer, pointer, pointer, int64, int32]
        self._copy_rows.restype = None
        self._copy_rows_verified = library.copy_rows_verified
        self._copy_rows_verified.argtypes = [pointer, pointer, pointer, int64, int32]
        self._copy_rows_verified.restype = int32
        self._rows_equal = library.rows_equal
        self._rows_equal.argtypes = [pointer, pointer, pointer, int64, int32]
        self._rows_equal.restype = int32
        self._fill_iovecs = library.fill_iovecs
        self._fill_iovecs.argtypes = [pointer, pointer, pointer, int64, int32]
        self._fill_iovecs.restype = int64
        self._pump = library.pump
        self._pump.argtypes = [int32, ctypes.POINTER(FlowState), int64, int64]
        self._pump.restype = int32

    def copy_rows(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        rows = np.ascontiguousarray(rows, np.int64)
        self._copy_rows(to, source, address_of(rows), len(rows), to_column)

    def copy_rows_verified(self, to: int, source: int, rows: Rows, *, to_column: int) -> bool:
        rows = np.ascontiguousarray(rows, np.int64)
        place = address_of(rows)
        return bool(self._copy_rows_verified(to, source, place, len(rows), to_column))

    def rows_equal(self, at: int, source: int, rows: Rows, *, column: int) -> bool:
        rows = np.ascontiguousarray(rows, np.int64)
        return bool(self._rows_equal(at, source, address_of(rows), len(rows), column))

    def iovecs(self, base: int, rows: Rows, *, column: int) -> IoVectors:
        rows = np.ascontiguousarray(rows, np.int64)
        made: IoVectors = np.empty((len(rows), 2), np.uint64)
        count = self._fill_iovecs(address_of(made), base, address_of(rows), len(rows), column)
        return made[:count]

    def pump(self, fd: int, flow: Flow, *, timeout_ns: int, spin_ns: int) -> End:
        return _ENDS[self._pump(fd, flow.state, timeout_ns, spin_ns)]
