"""Shared memory that is created and written here and mapped read-only by peers on the same host.

Owns the layout of such a file: the data, then one page whose first byte says whether the segment is still registered.
A seal enforces that no process can shrink the file under a reader (SIGBUS). Peers receive a read-only descriptor; the
writable one goes only to a peer with a lease of a window (write_windows.py).

Elastic memory creates pages when they are written and can give them back. A hole reads as zeros everywhere.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref

import numpy as np

from moonserve.protocol.errors import ConfigError, InvalidRequest, PeerLost
from moonserve.transfer.memory.data_plane import address_of, data_plane
from moonserve.transfer.memory.scatter import Rows

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PAGE = mmap.PAGESIZE
_LIVE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux ≥ 5.14
_MADV_COLLAPSE = 25  # Linux ≥ 6.1
_MAP_FIXED = 0x10  # linux/mman.h
_HUGE_PAGE = 2 << 20
_HUGE_BYTES = 2 * _HUGE_PAGE
"""Size from which rounding up to 2 MiB is affordable. Huge pages fill ten times as fast and copy a tenth faster, and a
disk reads 1 MiB into them in half the time (LOG.md)."""


def _marker(nbytes: int) -> int:
    """Returns the offset of the byte that says whether the segment is registered."""
    return -(-nbytes // _PAGE) * _PAGE


class OwnedMemory:
    """A sealed memfd and its owner's mapping. All pages are resident; with `elastic`, none is at first."""

    def __init__(self, nbytes: int, name: str = "", *, elastic: bool = False) -> None:
        """`name` appears in the process's maps. Raises ConfigError if the process or host cannot provide that much
        memory."""
        try:
            label = f"moonserve:{name[:64]}" if name else "moonserve"
            self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Closed with this object, not on deregistration: a thread may be passing the descriptor to a peer.
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, _marker(nbytes) + _PAGE)
            self._map = mmap.mmap(self.fd, 0, flags=mmap.MAP_SHARED)
            if not elastic:
                _use_huge_pages(self.fd, nbytes)
                _populate(self._map)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.shared_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.shared_fd)
        except OSError as error:
            raise _exhausted(nbytes, error) from error
        self.is_elastic = elastic
        self._marker = _marker(nbytes)
        self._map[self._marker] = _LIVE
        self.view = memoryview(self._map)[:nbytes]

    def populate(self, offset: int, nbytes: int) -> None:
        """Makes a range of whole pages resident. Content is unchanged, and a hole reads as zeros. Raises OSError if the
        machine has no memory for them."""
        _advise(address_of(self.view) + offset, nbytes, _MADV_POPULATE_WRITE)

    def discard(self, offset: int, nbytes: int) -> None:
        """Gives a range of whole pages back to the machine: it reads as zeros in every mapping from now on. Raises
        ValueError unless the memory is elastic."""
        if not self.is_elastic:
            raise ValueError("only elastic memory has pages to give back")
        _advise(address_of(self.view) + offset, nbytes, mmap.MADV_REMOVE)

    @property
    def resident_bytes(self) -> int:
        """Bytes of this memory that are resident, however many processes map it."""
        return os.fstat(self.fd).st_blocks * 512  # the unit of st_blocks, whatever st_blksize is

    def mark_dead(self) -> None:
        """Marks the content as meaningless for peers that still map it."""
        self._map[self._marker] = 0


class PeerMemory:
    """A peer's memfd, mapped. Owns neither the content nor the passed descriptor."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None:
        """Maps the file. Raises PeerLost if it is too small or lacks the seals of every `OwnedMemory`."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            size = os.fstat(fd).st_size
            if not sealed or not 0 < nbytes <= size - _PAGE:
                raise PeerLost("the peer offered memory whose size could still change")
            # Not populated: the pages exist already and fault in on first use, 16 or a huge page at a time. That costs
            # less than populating all of them and does not delay the first transfer.
            self.base = _mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ)
        except OSError as error:
            raise PeerLost("the peer offered memory that cannot be mapped") from error
        self._map = (ctypes.c_ubyte * size).from_address(self.base)
        weakref.finalize(self._map, _libc.munmap, self.base, size)
        self._marker = _marker(nbytes)
        self.nbytes = nbytes
        self.view = memoryview(self._map).cast("B").toreadonly()[:nbytes]
        self._native = (ctypes.c_int64 * 3)(self.base, nbytes, self.base + self._marker)
        self.native = ctypes.addressof(self._native)  # its `MappedMemory` (inline_copies.h)
        self._plane = data_plane()

    def copy(self, to: int, rows: Rows, *, to_column: int) -> None:
        self._plane.copy_rows(to, self.base, rows, to_column=to_column)

    def copy_verified(self, to: int, rows: Rows, *, to_column: int) -> bool:
        return self._plane.copy_rows_verified(to, self.base, rows, to_column=to_column)

    def require_live(self) -> None:
        """Checks that the owner has not deregistered the segment. Raises InvalidRequest if it has."""
        if not self.live:
            raise InvalidRequest("the peer's segment is no longer registered")

    @property
    def live(self) -> bool:
        return self._map[self._marker] == _LIVE

    def close(self) -> None:
        """Unmaps the memory, or leaves that to the last view that callers still hold."""
        del self._map
        with contextlib.suppress(BufferError):
            self.view.release()


def _mapped(fd: int, nbytes: int, access: int) -> int:
    """Maps a file where a huge page can begin. Returns the address. Raises OSError."""
    room: int = _libc.mmap(None, nbytes + _HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    begin = -(-room // _HUGE_PAGE) * _HUGE_PAGE
    if _libc.mmap(begin, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != begin:
        raise OSError(ctypes.get_errno(), "mmap")
    end = -(-(begin + nbytes) // _PAGE) * _PAGE
    _libc.munmap(room, begin - room)
    _libc.munmap(end, room + nbytes + _HUGE_PAGE - end)
    return begin


def _use_huge_pages(fd: int, nbytes: int) -> None:
    """Fills the file with huge pages as far as the kernel has them (from 6.1).

    Unlike MADV_HUGEPAGE, MADV_COLLAPSE works where shared memory gets none on its own, which is the default of Linux.
    It needs a mapping that begins on a huge page, and one page where a huge page is to be.
    """
    nbytes = nbytes // _HUGE_PAGE * _HUGE_PAGE
    if nbytes < _HUGE_BYTES:
        return
    begin = _mapped(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    if all(not _libc.madvise(at, _PAGE, _MADV_POPULATE_WRITE) for at in range(begin, begin + nbytes, _HUGE_PAGE)):
        _libc.madvise(begin, nbytes, _MADV_COLLAPSE)
    _libc.munmap(begin, nbytes)


def _populate(memory: mmap.mmap) -> None:
    """Makes every page resident. Raises OSError if there is no memory for that."""
    if len(memory) >= _HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        np.frombuffer(memory, np.uint8)[::_PAGE] = 0  # an older kernel


def _advise(address: int, nbytes: int, advice: int) -> None:
    """Calls madvise without the GIL, which mmap.madvise holds: one page of a pool takes a millisecond."""
    if _libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        if advice == _MADV_POPULATE_WRITE and number == errno.EINVAL:
            return  # an older kernel creates pages when they are written
        raise OSError(number, f"madvise({advice}): {os.strerror(number)}")


def _exhausted(nbytes: int, error: OSError) -> ConfigError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigError(f"no file descriptor is left for shared memory: raise `ulimit -n`: {error}")
    return ConfigError(f"this host cannot provide {nbytes} bytes of shared memory: {error}")
