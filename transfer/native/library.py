"""The data plane: `data_plane.c` called with numpy's memory, or Python where there is no C compiler."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from protocol.native import C_FLAGS, CompilerError, load_library, shared_cache
from transfer.native.base import (
    NO_VECTORS,
    DataPlane,
    End,
    Flow,
    FlowState,
    IoVectors,
    Queue,
    address_of,
)
from transfer.scatter import LENGTH, Rows

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("data_plane.c")
_BATCH = 64
"""Pieces per system call; making the views of 1024 costs more than it saves when few of them move."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
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
        library = load_library(SOURCE, C_FLAGS, folder)
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


class PythonDataPlane:
    """`DataPlane` for machines without a C compiler: the same results, call by call."""

    name = "python"

    def copy_rows(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        for row in rows.tolist():
            ctypes.memmove(to + row[to_column], source + row[1 - to_column], row[LENGTH])

    def copy_rows_verified(self, to: int, source: int, rows: Rows, *, to_column: int) -> bool:
        self.copy_rows(to, source, rows, to_column=to_column)
        return self.rows_equal(to, source, rows, column=to_column)

    def rows_equal(self, at: int, source: int, rows: Rows, *, column: int) -> bool:
        return all(
            _memcmp(at + row[column], source + row[1 - column], row[LENGTH]) == 0
            for row in rows.tolist()
        )

    def iovecs(self, base: int, rows: Rows, *, column: int) -> IoVectors:
        kept = rows[rows[:, LENGTH] > 0]
        if not len(kept):
            return NO_VECTORS
        starts, lengths = kept[:, column] + base, kept[:, LENGTH]
        breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1]) + 1
        firsts = np.concatenate(([0], breaks))
        return np.stack((starts[firsts], np.add.reduceat(lengths, firsts)), axis=1).astype(
            np.uint64
        )

    def pump(self, fd: int, flow: Flow, *, timeout_ns: int, spin_ns: int) -> End:
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, fd)
            try:
                return _pump(sock, flow, time.monotonic_ns() + timeout_ns)
            finally:
                sock.detach()
        except ConnectionResetError:
            return End.HANGUP
        except OSError as error:
            flow.state.error = error.errno or errno.EIO
            return End.ERROR


def _pump(sock: socket.socket, flow: Flow, deadline_ns: int) -> End:
    """Never spins: a thread that spins in Python holds up all the others."""
    flow.out.advance(0)
    flow.into.advance(0)
    receiving, broken = flow.wants_input, False
    while True:
        received = _attempt(_receive, sock, flow) if receiving else None
        sent = None
        if not broken:
            try:
                sent = _attempt(_send, sock, flow)
            except BrokenPipeError:  # there may still be something for us
                broken = True
        now = time.monotonic_ns()
        if received or sent:
            flow.state.active_at_ns = now
        if receiving and not flow.wants_input:
            return End.IN_DONE
        if received == 0 or (broken and not receiving):
            return End.HANGUP
        sending = not broken and not flow.out.empty
        if not receiving and not sending:
            return End.OUT_DONE
        if now >= deadline_ns:
            return End.TIMEOUT
        if not received and not sent:
            wait_ready(sock, receiving, sending, deadline_ns - now)


def _attempt(
    move: Callable[[socket.socket, Flow], int | None], sock: socket.socket, flow: Flow
) -> int | None:
    """Bytes moved; None when nothing can move now."""
    try:
        return move(sock, flow)
    except (BlockingIOError, InterruptedError):
        return None


def _send(sock: socket.socket, flow: Flow) -> int | None:
    if flow.out.empty:
        return None
    count = sock.sendmsg(_views(flow.out), (), _FLAGS)
    flow.out.advance(count)
    return count


def _receive(sock: socket.socket, flow: Flow) -> int:
    # CMSG_LEN, not CMSG_SPACE: room for exactly one descriptor, the kernel closes the others.
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    count, control, _, _ = sock.recvmsg_into(_views(flow.into), socket.CMSG_LEN(4), flags)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            if (unclaimed := flow.take_descriptor()) is not None:
                os.close(unclaimed)
            flow.state.descriptor = int.from_bytes(data[:4], sys.byteorder, signed=True)
    flow.into.advance(count)
    return count


def _views(queue: Queue) -> list[memoryview]:
    pieces = queue.array[queue.index : queue.index + _BATCH].tolist()
    pieces[0] = (pieces[0][0] + queue.offset, pieces[0][1] - queue.offset)
    return [memoryview((ctypes.c_char * length).from_address(at)) for at, length in pieces]


def wait_ready(sock: socket.socket, receiving: bool, sending: bool, timeout_ns: int) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN * receiving | select.POLLOUT * sending)
    poller.poll(timeout_ns / 1e6)
