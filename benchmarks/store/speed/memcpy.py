"""Plain memory copies of the same sizes in the same pattern, as the limit of a get that copies."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.store.speed import client
from benchmarks.store.speed.workload import HALF_BYTES, POOL_BYTES, Batch, Load
from benchmarks.transfer.contestant import private_pool, touched
from benchmarks.transfer.workload import Bytes


class Client(client.StoreClient):
    """Copies to and from memory in place of a store. `options["shared"]`: this memory is a shared mapping, as a store's
    segment must be; otherwise private memory with huge pages."""

    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(facts, options)
        self.pool = private_pool(POOL_BYTES)
        kind = mmap.MAP_SHARED if options["shared"] else mmap.MAP_PRIVATE
        memory = mmap.mmap(-1, HALF_BYTES, kind | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._store = touched(memory)

    def prepared(self, batch: Batch, load: Load, mode: str) -> list[tuple[Bytes, Bytes]]:
        pairs = []
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            stored = self._store[int(key.rpartition("-")[2]) * batch.length :][: batch.length]
            ours = self.pool[offset : offset + batch.length]
            pairs.append((stored, ours) if load.op == "put" else (ours, stored))
        return pairs

    def put(self, call: list[tuple[Bytes, Bytes]]) -> None:
        for destination, source in call:
            np.copyto(destination, source)

    get = put

    def remove(self, keys: Sequence[str]) -> None:
        pass
