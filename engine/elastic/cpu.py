"""Host memory as elastic memory: a mapping of the whole range, whose pages the kernel gives and takes on request.

A frame has no identity here: `map` has the kernel populate the pages (MADV_POPULATE_WRITE; without it, Linux < 5.14,
each is touched), so that nothing faults while a model computes, and `unmap` takes them away, so that the process's
resident memory really falls: MADV_DONTNEED for memory of this process alone, MADV_REMOVE, which makes a hole in the
file, for a memfd that peers map. New pages are zero, so one model never sees another's bytes. What is not mapped reads
as zeros; a stray write there would be resident without being counted.

Huge pages are refused: one would make 2 MiB resident where a frame was asked for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from engine.elastic.base import MappingFailed
from engine.elastic.pages import Frame
from protocol.errors import ConfigError

_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux ≥ 5.14
_MAP_NORESERVE = 0x4000  # linux/mman.h; Python names it from 3.13 on
_PROT_NONE = 0
FRAME_BYTES = 64 << 10
"""A page of a model is 2·layers frames: 16 MiB with 128 layers. Smaller ones cost more calls per byte."""

# Unlike mmap.madvise, calls through ctypes release the interpreter lock: populating a page takes a millisecond.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = _libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CpuBacking:
    """Anonymous memory, or with `shared` a memfd for each range (`CpuRange.fd`) that other processes can map."""

    def __init__(self, *, frame_bytes: int = FRAME_BYTES, shared: bool = False) -> None:
        if frame_bytes < 1 or frame_bytes % mmap.PAGESIZE:
            raise ConfigError(f"frames of {frame_bytes} bytes are not whole {mmap.PAGESIZE}")
        self.frame_bytes = frame_bytes
        self._shared = shared

    def reserve(self, nbytes: int) -> CpuRange:
        try:
            return CpuRange(nbytes, self._shared)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"{nbytes} bytes of addresses cannot be reserved: {error}") from error

    def release(self, frames: Sequence[Frame]) -> None:
        """Nothing is kept of a frame that is not mapped."""

    def close(self) -> None:
        """Nothing is kept."""


class CpuRange:
    """A range and a guard page behind it, at which the kernel's account of this memory (/proc/self/smaps) ends too."""

    def __init__(self, nbytes: int, shared: bool) -> None:
        self.nbytes = nbytes
        self.fd: int | None = None
        total = nbytes + mmap.PAGESIZE
        if shared:
            self.fd = os.memfd_create("moonserve-elastic", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, total)
            self._map = mmap.mmap(self.fd, total, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._map = mmap.mmap(-1, total, flags=flags)
        self._remove = mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
        if _libc.mprotect(self.address + nbytes, mmap.PAGESIZE, _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
        _advise(self.address, nbytes, mmap.MADV_NOHUGEPAGE)

    @property
    def memory(self) -> memoryview:
        return memoryview(self._map)[: self.nbytes]

    def map(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        try:
            for offset in offsets:
                _populate(self.address + offset, span_bytes)
        except OSError as error:
            self.unmap(offsets, span_bytes, frames)
            raise MappingFailed(str(error)) from error

    def unmap(self, offsets: Sequence[int], span_bytes: int, frames: Sequence[Frame]) -> None:
        for offset in offsets:
            _advise(self.address + offset, span_bytes, self._remove)

    def close(self) -> None:
        """Addresses stay reserved for as long as somebody has a view of them."""
        _advise(self.address, self.nbytes, self._remove)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _libc.madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        if advice == mmap.MADV_NOHUGEPAGE and number == errno.EINVAL:
            return  # a kernel without huge pages
        raise OSError(number, f"madvise({advice}): {os.strerror(number)}")


def _populate(address: int, nbytes: int) -> None:
    try:
        _advise(address, nbytes, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        ctypes.memset(address, 0, nbytes)
