"""The data plane in Python, for machines without a C compiler: the same results, call by call.

Also the plainest description of what `data_plane.c` does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Callable

import numpy as np

from transfer.native.base import NO_VECTORS, End, Flow, IoVectors, Queue
from transfer.rows import LENGTH, Rows

_BATCH = 64
"""Pieces per system call; making the views of 1024 costs more than it saves when few of them move."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class PythonDataPlane:
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
    advance(flow.out, 0)
    advance(flow.into, 0)
    receiving, broken = wants_input(flow), False
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
        if receiving and not wants_input(flow):
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


def wants_input(flow: Flow) -> bool:
    return flow.into.moved < flow.state.wanted and not flow.into.empty


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
    advance(flow.out, count)
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
    advance(flow.into, count)
    return count


def _views(queue: Queue) -> list[memoryview]:
    pieces = queue.array[queue.index : queue.index + _BATCH].tolist()
    pieces[0] = (pieces[0][0] + queue.offset, pieces[0][1] - queue.offset)
    return [memoryview((ctypes.c_char * length).from_address(at)) for at, length in pieces]


def advance(queue: Queue, count: int) -> None:
    """`count` more bytes are done; whatever is empty behind them is done too."""
    queue.moved += count
    count += queue.offset
    while queue.index < queue.count and count >= (length := int(queue.array[queue.index, 1])):
        count -= length
        queue.index += 1
    queue.offset = 0 if queue.empty else count


def wait_ready(sock: socket.socket, receiving: bool, sending: bool, timeout_ns: int) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN * receiving | select.POLLOUT * sending)
    poller.poll(timeout_ns / 1e6)
