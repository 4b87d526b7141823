"""memcpy between shared mappings, and process_vm_readv / process_vm_writev on the other process's memory."""

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import private_pool, touched
from benchmarks.transfer.workload import LOCAL, POOL_BYTES, REMOTE, Bytes, Load, Offsets

PR_SET_PTRACER = 0x59616D61
"""prctl(2): process that may access this one if Yama restricts access to ancestors."""
PR_SET_PTRACER_ANY = -1

libc = ctypes.CDLL(None, use_errno=True)


class CopyTarget(contestant.Target):
    """Target that only owns memory, in a file that the initiator maps."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._file = os.memfd_create("benchmark")
        os.ftruncate(self._file, POOL_BYTES)
        self.pool = _mapped(self._file, huge=options["huge"])

    def hello(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}"}


class CopyInitiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        own = os.memfd_create("benchmark")
        os.ftruncate(own, POOL_BYTES)
        self.pool = _mapped(own, huge=options["huge"])

    def connect(self, other: dict[str, Any]) -> None:
        with open(other["path"], "r+b") as file:
            self._remote = _mapped(file.fileno(), huge=self.options["huge"])

    def prepared(self, batch: Offsets) -> list[tuple[Bytes, Bytes]]:
        length = self.load.block_bytes
        pairs = []
        for offsets in batch.reshape(-1, 2):
            remote = self._remote[offsets[REMOTE] :][:length]
            local = self.pool[offsets[LOCAL] :][:length]
            pairs.append((local, remote) if self.load.op == "read" else (remote, local))
        return pairs

    def post(self, batch: list[tuple[Bytes, Bytes]]) -> None:
        for destination, source in batch:
            np.copyto(destination, source)


def _mapped(file: int, *, huge: bool) -> Bytes:
    memory = mmap.mmap(file, POOL_BYTES)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return touched(memory)


class IoVector(ctypes.Structure):
    """The C type `struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class VmTarget(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0)

    def hello(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "base": self.pool.ctypes.data}


class VmInitiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()

    def connect(self, other: dict[str, Any]) -> None:
        self._pid, self._remote = other["pid"], other["base"]

    def prepare(self, load: Load, mode: str) -> None:
        super().prepare(load, mode)
        self._call = libc.process_vm_readv if load.op == "read" else libc.process_vm_writev
        self._call.restype = ctypes.c_ssize_t

    def prepared(self, batch: Offsets) -> tuple[Any, Any, int]:
        blocks = batch.reshape(-1, 2)
        return (
            self._vectors(self.pool.ctypes.data + blocks[:, LOCAL]),
            self._vectors(self._remote + blocks[:, REMOTE]),
            len(blocks),
        )

    def _vectors(self, addresses: Any) -> Any:
        length = self.load.block_bytes
        return (IoVector * len(addresses))(*[IoVector(int(at), length) for at in addresses])

    def post(self, batch: tuple[Any, Any, int]) -> None:
        local, remote, count = batch
        left = self.load.batch_bytes
        moved = self._call(self._pid, local, count, remote, count, 0)
        if moved != left:
            raise OSError(ctypes.get_errno(), f"{moved} of {left} bytes moved")
