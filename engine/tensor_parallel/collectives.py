"""Collective operations of a worker's ranks through shared memory, in C++ (`engine/tensor_parallel/collectives.cpp`).

A sum takes some microseconds if each rank has a core; over sockets it would take hundreds. All ranks make the same
calls in the same order with the same shapes. Sums are computed in float32 in the order of ranks, so they have the same
bits at every rank, every time and whatever else is in a step.
"""

import ctypes
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch

from moonserve.engine.kernels.native_library import load_kernels
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.process.native_libraries import c_fields

# Longer than any step on a machine that can serve. Bounds the time that a stopped rank holds up the others.
RANK_TIMEOUT_S = 60.0


SOURCE = Path(__file__).with_name("collectives.cpp")
MAX_RANKS = 16  # limit in collectives.cpp
# Small enough for all ranks' slots to stay in a core's L2 cache, large enough to wait for slow ranks seldom.
_SLOT_BYTES = 256 << 10
_OUTCOMES = {1: "a rank has died", 2: f"a rank has not arrived for {RANK_TIMEOUT_S:g} s"}


class _CRanks(ctypes.Structure):
    """C structure `Ranks` of collectives.cpp."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        *c_fields(ctypes.c_int64, "slot_bytes timeout_ns"),
        *c_fields(ctypes.c_int32, "rank size"),
        ("rounds", ctypes.c_uint32),
        ("num_sockets", ctypes.c_int32),
        ("sockets", ctypes.c_int32 * MAX_RANKS),
    )


class CollectivesLibrary:
    """Compiled functions of collectives.cpp. Raises CompilerError."""

    def __init__(self, cache_folder: Path | None) -> None:
        library = load_kernels(SOURCE, cache_folder)
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._memory_bytes = library.ranks_memory_bytes
        self._memory_bytes.argtypes, self._memory_bytes.restype = [ctypes.c_int32, count], count
        self.gather = library.ranks_gather
        self.gather.argtypes = [pointer, pointer, count, pointer]
        self.add = {
            torch.float32: library.ranks_add_float32,
            torch.bfloat16: library.ranks_add_bfloat16,
        }
        for add in self.add.values():
            add.argtypes = [pointer, pointer, pointer, count]

    def memory_bytes(self, size: int) -> int:
        """Returns the size of the memory that `size` ranks share. It must be zeroed before the first rank begins."""
        nbytes: int = self._memory_bytes(size, _SLOT_BYTES)
        return nbytes

    def make_memory(self, size: int) -> int:
        """Creates the shared memory of `size` ranks and returns its descriptor, which the caller owns."""
        fd = os.memfd_create("moonserve:ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.memory_bytes(size))
        return fd


class Collectives:
    """Collective operations of one rank over `memory`, a mapping that all ranks share. One caller at a time. Every call
    raises PeerLost if another rank has died or has not arrived for `RANK_TIMEOUT_S`; no call works after that."""

    def __init__(
        self,
        library: CollectivesLibrary,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        sockets: Sequence[socket.socket],
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        """`sockets`: connections to other ranks, which keep them open as long as they live."""
        self._library = library
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._sockets = tuple(sockets)  # kept open
        self._rank, self._size = rank, size
        self._ranks = _CRanks(
            memory=self._memory.data_ptr(),
            slot_bytes=_SLOT_BYTES,
            timeout_ns=int(timeout_s * 1e9),
            rank=rank,
            size=size,
            rounds=0,
            num_sockets=len(sockets),
            sockets=(ctypes.c_int32 * MAX_RANKS)(*(each.fileno() for each in sockets)),
        )
        self._address = ctypes.addressof(self._ranks)

    def all_reduce(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds all ranks' parts to `hidden`, which is equal at all ranks. All are contiguous and of one shape."""
        function = self._library.add[hidden.dtype]
        self._check(function(self._address, hidden.data_ptr(), part.data_ptr(), part.numel()))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Returns all ranks' parts in order at rank 0, else an empty list. Parts are contiguous and of one shape."""
        parts = part.new_empty(self._size if self._rank == 0 else 0, *part.shape)
        to = parts.data_ptr() if self._rank == 0 else None
        self._check(self._library.gather(self._address, part.data_ptr(), part.nbytes, to))
        return list(parts.unbind(0))

    def _check(self, outcome: int) -> None:
        if outcome:
            raise PeerLost(f"tensor parallelism: {_OUTCOMES[outcome]}")
