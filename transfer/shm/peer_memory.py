"""Memory of another process of this host: mapped (memfd) or read by address (process_vm_readv), and copied in steps,
verified.

Copying has one rule: with checksums on, both sides of every step are read again after the copy and compared. That costs
less than a checksum of each side and misses nothing. Bytes that changed meanwhile or were copied wrong are an
IntegrityError, never a success.

The initiator reads the target's segments; the target reads offered ones. Reading by address is process_vm_readv. It is
permitted to a process that may attach a debugger, so for the same user unless the kernel (Yama) or a container's system
call filter is stricter. Each segment read by address has a marker, a page of shared memory that its owner clears on
deregistration. If memory can be neither mapped nor read, its bytes travel on the connection.
"""

import contextlib
import ctypes
import errno
import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from moonserve.protocol.errors import IntegrityError, InvalidRequest, PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import MAX_IOVECS, IoVectors, address_of, data_plane
from moonserve.transfer.memory.memfd import PeerMemory
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, MAX_ROWS, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment

_log = logging.getLogger(__name__)

STEP_BYTES = 4 << 20
"""A copy of this size takes less than a millisecond, the longest that close_window waits."""
CHANGED = "bytes changed while they were copied within the host"

_unguarded: AbstractContextManager[None] = contextlib.nullcontext()


class ReadableMemory(Protocol):
    """Readable memory of a peer."""

    nbytes: int

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        """Copies rows out of the memory. Raises PeerLost or InvalidRequest if it cannot be read any more."""

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        """Copies rows and reads both sides again. Returns False if they differ then."""

    def require_live(self) -> None:
        """Checks, after copying, that the owner has not deregistered the memory. Raises InvalidRequest if it has."""

    @property
    def live(self) -> bool: ...
    def close(self) -> None: ...


def copy_in_steps(
    source: ReadableMemory,
    into: Segment,
    rows: Rows,
    *,
    to_column: int,
    verified: bool,
    guard: AbstractContextManager[None] = _unguarded,
) -> None:
    """Copies rows whose bounds were checked. Each step's stores happen inside `guard`, which may refuse them."""
    is_short = scatter.total(rows) <= STEP_BYTES
    steps = [rows] if is_short else [step for step, _ in scatter.cut(rows, STEP_BYTES, MAX_ROWS)]
    for step in steps:
        with guard:
            if not verified:
                source.copy(into.base, step, to_column=to_column)
            elif not source.copy_verified(into.base, step, to_column=to_column):
                raise IntegrityError(CHANGED)
    source.require_live()


_libc = ctypes.CDLL(None, use_errno=True)
_read = _libc.process_vm_readv
_pointer, _count = ctypes.c_void_p, ctypes.c_ulong
_read.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]
_read.restype = ctypes.c_ssize_t


class PeerProcess:
    """A process identified beyond reuse of its pid. Owns a pidfd."""

    def __init__(self, pid: int) -> None:
        """Opens the process. Raises OSError if it does not exist in this pid namespace."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def read(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        """Copies each row's bytes from the process's memory at `source` to local memory at `to`, without the GIL.

        Raises OSError: EPERM if that is not permitted, EFAULT if a row is not fully mapped there, ESRCH if the process
        has ended before or during the copy. A row is less than 2 GiB.
        """
        for first in range(0, len(rows), MAX_IOVECS):
            part = rows[first : first + MAX_IOVECS]
            into = _pieces(to, part, to_column)
            self._read_pieces(into, _pieces(source, part, 1 - to_column))
        if self._has_ended():  # after the copy: a pid is not reused while its process lives
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def _read_pieces(self, into: IoVectors, out_of: IoVectors) -> None:
        count = len(into)
        moved = _read(self.pid, into.ctypes.data, count, out_of.ctypes.data, count, 0)
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if moved != int(into[:, 1].sum()):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    def _has_ended(self) -> bool:
        ended = select.poll()  # a new one, because a poll object refuses to be used by two threads at once
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)


def is_visible(pid: int) -> bool:
    """Returns True if pids mean the same in that process as in this one."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _pieces(base: int, rows: Rows, column: int) -> IoVectors:
    made: IoVectors = np.empty((len(rows), 2), np.uint64)
    made[:, 0] = rows[:, column] + base
    made[:, 1] = rows[:, LENGTH]
    return made


class ProcessMemory:
    """A `ReadableMemory` over another process's addresses. Does not own `process`."""

    def __init__(self, process: PeerProcess, base: int, nbytes: int, marker: PeerMemory) -> None:
        """Takes ownership of the marker. Raises OSError if the memory's ends cannot be read, PeerLost for impossible
        values."""
        if nbytes <= 0 or base <= 0 or base + nbytes > 1 << 63:
            raise PeerLost("the peer offered memory at an impossible address")
        self.nbytes = nbytes
        self._process = process
        self._base = base
        self._marker = marker
        self._lock = threading.Lock()
        """Protects the scratch memory."""
        self._scratch = bytearray()
        probe = bytearray(2)
        ends = scatter.rows((0, 0, 1), (nbytes - 1, 1, 1))
        process.read(address_of(probe), base, ends, to_column=LOCAL)

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        try:
            self._process.read(to, self._base, rows, to_column=to_column)
        except ProcessLookupError as error:
            raise PeerLost("the peer's process has ended") from error
        except OSError as error:
            self.require_live()
            reason = errno.errorcode.get(error.errno or 0, "")
            raise InvalidRequest(f"the peer's memory cannot be read: {reason}") from error

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        """Verifies by a second copy, since the bytes cannot be compared in place."""
        self.copy(to, rows, to_column=to_column)
        lengths = rows[:, LENGTH]
        packed_at = np.cumsum(lengths) - lengths
        nbytes = scatter.total(rows)
        with self._lock:
            if len(self._scratch) < nbytes:
                self._scratch = bytearray(nbytes)
            packed = address_of(self._scratch)
            self.copy(packed, np.stack((rows[:, 1 - to_column], packed_at, lengths), 1), to_column=LOCAL)
            places = np.stack((rows[:, to_column], packed_at, lengths), 1)
            return data_plane().rows_equal(to, packed, places, column=REMOTE)

    def require_live(self) -> None:
        self._marker.require_live()

    @property
    def live(self) -> bool:
        return self._marker.live

    def close(self) -> None:
        self._marker.close()


class PeerSegments:
    """Reachable memory by the peer's segment id; None if only the connection can carry it."""

    def __init__(self, peer_pid: Callable[[], int], *, writable: bool = False) -> None:
        self._peer_pid = peer_pid
        self._writable = writable
        self._segments: dict[int, ReadableMemory | None] = {}
        self._process: PeerProcess | None = None

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: int) -> bool:
        return segment_id in self._segments

    def get(self, segment_id: int) -> ReadableMemory | None:
        return self._segments.get(segment_id)

    def add(self, segment_id: int, fd: int | None, base: int, nbytes: int) -> None:
        """Adds a segment. `fd` is its memory, or its marker if `base` is an address in the peer's process.

        The caller keeps the descriptor. Raises PeerLost for memory that is not sealed against resizing.
        """
        self._drop_dead()
        if fd is None:
            self._segments[segment_id] = None
        elif base:
            self._segments[segment_id] = self._readable(base, nbytes, PeerMemory(fd, 1))
        else:
            self._segments[segment_id] = PeerMemory(fd, nbytes, writable=self._writable)

    def _readable(self, base: int, nbytes: int, marker: PeerMemory) -> ReadableMemory | None:
        try:
            if self._process is None:
                self._process = PeerProcess(self._peer_pid())
            return ProcessMemory(self._process, base, nbytes, marker)
        except OSError as error:  # not permitted, or another pid namespace
            _log.info("memory of the peer's process cannot be read here: %s", error)
            marker.close()
            return None

    def _drop_dead(self) -> None:
        """Unmaps memory that its owner has deregistered, so that its pages can be freed."""
        for segment_id, source in list(self._segments.items()):
            if source is not None and not source.live:
                source.close()
                del self._segments[segment_id]

    def close(self) -> None:
        for source in self._segments.values():
            if source is not None:
                source.close()
        self._segments.clear()
        if self._process is not None:
            self._process.close()
            self._process = None
