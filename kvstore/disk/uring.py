"""io_uring as Python sees it: `ring.c`, compiled once per machine, and the layouts that both share.

Its rule: addresses go to the kernel as they are; whoever begins an operation keeps its memory until it has ended. Knows
nothing of files and of who waits. Not the package `liburing`: that one never lets go of a vector of buffers.
"""

from __future__ import annotations

import ctypes
import os
import struct
from enum import IntEnum
from pathlib import Path

from protocol.native import load_library, shared_cache

SOURCE = Path(__file__).with_name("ring.c")
FLAGS = ("-std=gnu11", "-O2", "-fvisibility=hidden")

OPERATION = struct.Struct("<QQQiIII")
"""Vector, offset, id, file, buffers, what, flags. `struct operation` of ring.c."""
OUTCOME = struct.Struct("<Qq")
"""Id, bytes or an errno below 0. `struct outcome` of ring.c."""
BUFFER = struct.Struct("<QQ")
"""Address and length: `struct iovec`."""

IN_KERNEL_THREAD = 1 << 4
"""IOSQE_ASYNC: begun by a thread of the kernel, so that submitting takes no time."""


class Opcode(IntEnum):
    """Of linux/io_uring.h."""

    READV = 1
    WRITEV = 2


class RingState(ctypes.Structure):
    """`struct ring` of ring.c: all of it is C's."""

    _fields_ = (("fd", ctypes.c_int64), ("rest", ctypes.c_uint64 * 12))
    fd: int


class Uring:
    """One ring. Raises CompilerError where it cannot be compiled, OSError where the kernel refuses."""

    def __init__(self, num_entries: int) -> None:
        library = load_library(SOURCE, FLAGS, shared_cache())
        self._submit = library.ring_submit
        self._submit.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
        self._submit.restype = ctypes.c_int64
        self._reap = ctypes.PyDLL(library._name, handle=library._handle).ring_reap
        self._reap.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
        self._reap.restype = ctypes.c_int64
        self._close = library.ring_close
        self._close.argtypes = (ctypes.c_void_p,)
        self._close.restype = None
        self._state = RingState()
        self._at = ctypes.addressof(self._state)
        self.num_entries = num_entries
        self.operations = ctypes.create_string_buffer(num_entries * OPERATION.size)
        """To be filled before `submit`."""
        self._outcomes = ctypes.create_string_buffer(num_entries * OUTCOME.size)
        library.ring_open.argtypes = ctypes.c_void_p, ctypes.c_uint32
        library.ring_open.restype = ctypes.c_int64
        error = library.ring_open(self._at, num_entries)
        if error:
            raise OSError(-error, os.strerror(-error))

    @property
    def fd(self) -> int:
        """Readable when something has ended."""
        return self._state.fd

    def submit(self, count: int) -> int:
        """How many of the first `count` of `operations` were begun. Never more under way than there are entries."""
        begun: int = self._submit(self._at, self.operations, count)
        return begun

    def reap(self) -> list[tuple[int, int]]:
        """(id, result) of what has ended since."""
        count = self._reap(self._at, self._outcomes, self.num_entries)
        ended: list[tuple[int, int]] = list(
            OUTCOME.iter_unpack(memoryview(self._outcomes)[: count * OUTCOME.size])
        )
        return ended

    def close(self) -> None:
        self._close(self._at)
