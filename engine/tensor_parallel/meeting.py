"""How the ranks of a worker will reach each other: rank 0 makes it, the others are handed it.

Shared memory where it can be compiled, gloo where it cannot, or where `--kernels torch` asks for nothing compiled.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.tensor_parallel.base import Ranks
from engine.tensor_parallel.gloo import GlooRanks
from engine.tensor_parallel.shared import MAX_RANKS, RanksLibrary, SharedMemoryRanks
from protocol.errors import ConfigError
from protocol.native import CompilerError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Either is given. The descriptor belongs to whoever has this."""

    fd: int | None = None  # of memory that all share
    file: Path | None = None  # where gloo's ranks find each other

    def close(self) -> None:
        """When the ranks have ended."""
        if self.fd is not None:
            os.close(self.fd)
        if self.file is not None:
            shutil.rmtree(self.file.parent, ignore_errors=True)

    def join(
        self, rank: int, size: int, sockets: Sequence[socket.socket], cache_folder: Path
    ) -> Ranks:
        """`sockets`: each connected to another rank."""
        if self.file is not None:
            return GlooRanks(self.file, rank=rank, size=size)
        assert self.fd is not None
        library = RanksLibrary(cache_folder)
        memory = mmap.mmap(self.fd, library.memory_bytes(size))
        return SharedMemoryRanks(library, memory, rank=rank, size=size, sockets=sockets)


def arrange(
    kernels: str, size: int, cache_folder: Path, compiling: Callable[[], None] | None = None
) -> Meeting:
    """For workers with these `--kernels`. Raises ConfigError for too many ranks, and where native kernels are demanded
    and cannot be had."""
    if size > MAX_RANKS:
        raise ConfigError(f"--tensor-parallel-size {size} is above {MAX_RANKS}")
    if kernels == "torch":
        return _by_gloo()
    try:
        nbytes = RanksLibrary(cache_folder, compiling).memory_bytes(size)
    except CompilerError as error:
        if kernels == "native":
            raise ConfigError(f"ranks cannot share memory: {error}") from error
        log.warning("ranks cannot share memory, using gloo: %s", error)
        return _by_gloo()
    fd = os.memfd_create("moonserve:ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return Meeting(fd=fd)


def _by_gloo() -> Meeting:
    return Meeting(file=Path(tempfile.mkdtemp(prefix="moonserve-ranks-")) / "store")
