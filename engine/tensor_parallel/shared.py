"""How the ranks of a worker reach each other: through shared memory, in C++ (`engine/native/ranks.cpp`).

Some microseconds per sum where both ranks have a core; sockets take hundreds. All ranks make the same calls in the same
order, with the same shapes. Sums are taken in float32 in the order of ranks, so they are the same bits at every rank,
every time and whatever else is in a step.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.kernels.library import load_kernels
from protocol.errors import PeerLost

# Longer than any step takes on a machine that could serve; a rank that is stopped must not hold the others for ever.
PATIENCE_S = 60.0


SOURCE = Path(__file__).parent.parent / "native" / "ranks.cpp"
MAX_RANKS = 16  # of ranks.cpp
# What all ranks leave at once stays in a core's second-level cache, and whoever is behind is waited for seldom.
_SLOT_BYTES = 256 << 10
_OUTCOMES = {1: "a rank has died", 2: f"a rank has not come for {PATIENCE_S:g} s"}


class _CRanks(ctypes.Structure):
    """`Ranks` of ranks.cpp."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("patience_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("rounds", ctypes.c_uint32),
        ("num_sockets", ctypes.c_int32),
        ("sockets", ctypes.c_int32 * MAX_RANKS),
    )


class RanksLibrary:
    """The compiled functions. Raises CompilerError."""

    def __init__(self, cache_folder: Path | None, compiling: Callable[[], None] | None = None) -> None:
        library = load_kernels(SOURCE, cache_folder, compiling)
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
        """That so many ranks share; zeroed before the first of them begins."""
        nbytes: int = self._memory_bytes(size, _SLOT_BYTES)
        return nbytes

    def make_memory(self, size: int) -> int:
        """A descriptor of such memory, which belongs to the caller."""
        fd = os.memfd_create("moonserve:ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.memory_bytes(size))
        return fd


class Ranks:
    """The ranks of one worker as one of them sees them, over `memory`, a mapping that all share. One caller at a time.
    Every call raises PeerLost when another rank has died or has not come for `PATIENCE_S`; nothing works after that."""

    def __init__(
        self,
        library: RanksLibrary,
        memory: mmap.mmap,
        *,
        rank: int,
        size: int,
        sockets: Sequence[socket.socket],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`sockets`: each connected to another rank, which has it open as long as it lives."""
        self._library = library
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._sockets = tuple(sockets)  # open as long as this
        self._rank, self._size = rank, size
        self._ranks = _CRanks(
            memory=self._memory.data_ptr(),
            slot_bytes=_SLOT_BYTES,
            patience_ns=int(patience_s * 1e9),
            rank=rank,
            size=size,
            rounds=0,
            num_sockets=len(sockets),
            sockets=(ctypes.c_int32 * MAX_RANKS)(*(each.fileno() for each in sockets)),
        )
        self._address = ctypes.addressof(self._ranks)

    def add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds the sum of all ranks' parts to `hidden`, which is equal at all of them. Shapes are equal, contiguous."""
        function = self._library.add[hidden.dtype]
        self._check(function(self._address, hidden.data_ptr(), part.data_ptr(), part.numel()))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Rank 0 gets all parts in order, of one shape, contiguous; the others an empty list."""
        parts = part.new_empty(self._size if self._rank == 0 else 0, *part.shape)
        to = parts.data_ptr() if self._rank == 0 else None
        self._check(self._library.gather(self._address, part.data_ptr(), part.nbytes, to))
        return list(parts.unbind(0))

    def _check(self, outcome: int) -> None:
        if outcome:
            raise PeerLost(f"tensor parallelism: {_OUTCOMES[outcome]}")
