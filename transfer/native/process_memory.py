"""Reading the memory of another process of this host in one copy (process_vm_readv), where permitted.

Whoever may attach a debugger may do it: the same user, unless the kernel is told to be stricter (Yama)
or a container's system call filter forbids it. Knows nothing of what the addresses mean.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select

import numpy as np

from transfer.native.base import MAX_IOVECS, IoVectors
from transfer.rows import LENGTH, Rows

_libc = ctypes.CDLL(None, use_errno=True)
_read = _libc.process_vm_readv
_pointer, _count = ctypes.c_void_p, ctypes.c_ulong
_read.argtypes = [ctypes.c_int, _pointer, _count, _pointer, _count, _count]
_read.restype = ctypes.c_ssize_t


class OtherProcess:
    """A living process, and no other that later gets the same number. Owns a descriptor."""

    def __init__(self, pid: int) -> None:
        """Raises OSError: there is no such process, or not in this pid namespace."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)

    def read(self, to: int, source: int, rows: Rows, *, to_column: int) -> None:
        """Copies each row's bytes from its memory (`source` and on) to ours, without the GIL.

        Raises OSError: EPERM when that is not permitted, EFAULT when a row is not all mapped there,
        ESRCH when the process has ended, before or meanwhile. A row is less than 2 GiB.
        """
        for first in range(0, len(rows), MAX_IOVECS):
            part = rows[first : first + MAX_IOVECS]
            into = _pieces(to, part, to_column)
            self._read_pieces(into, _pieces(source, part, 1 - to_column))
        if self._ended.poll(0):  # after the copy: until then the number cannot have been given away
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))

    def _read_pieces(self, into: IoVectors, out_of: IoVectors) -> None:
        count = len(into)
        moved = _read(self.pid, into.ctypes.data, count, out_of.ctypes.data, count, 0)
        if moved < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if moved != int(into[:, 1].sum()):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    def close(self) -> None:
        os.close(self._pidfd)


def _pieces(base: int, rows: Rows, column: int) -> IoVectors:
    made: IoVectors = np.empty((len(rows), 2), np.uint64)
    made[:, 0] = rows[:, column] + base
    made[:, 1] = rows[:, LENGTH]
    return made
