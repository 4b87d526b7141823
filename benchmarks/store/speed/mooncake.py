"""Mooncake Store: get_into and put_from with registered memory, or get_buffer into the store's own buffers.

`options["path"]` is the client's path to the bytes: "tcp" = another process has the segment, reached by the transfer
engine; "shm" = another process has it, in shared memory; "inside" = the client's process has the segment itself.
Run as a program, this module is a process that only holds a segment.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

from benchmarks.store.speed import client
from benchmarks.store.speed.workload import POOL_BYTES, Batch, Load
from benchmarks.transfer.contestant import private_pool
from benchmarks.transfer.workload import MIB
from moonserve.protocol.process import child_process

LOCAL_BUFFER_BYTES = 64 * MIB
"""Memory from which get_buffer allocates."""
INTO, BUFFER = "into", "buffer"

Call = tuple[str, list[str], list[int], list[int]]
"""Mode, keys, addresses, lengths."""


def connected(master: str, segment_bytes: int) -> Any:
    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master):
        raise OSError("setup failed")
    return store


class Client(client.StoreClient):
    def __init__(self, facts: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(facts, options)
        if options["path"] == "shm":
            self._store = MooncakeDistributedStore()
            if self._store.setup_dummy(2 * POOL_BYTES, LOCAL_BUFFER_BYTES, facts["client"]):
                raise OSError("setup_dummy failed")
            self._base = self._store.alloc_from_mem_pool(POOL_BYTES)
            memory = (ctypes.c_uint8 * POOL_BYTES).from_address(self._base)
            self.pool = np.ctypeslib.as_array(memory)
        else:
            inside = options["segment_bytes"] if options["path"] == "inside" else 0
            self._store = connected(facts["master"], inside)
            self.pool = private_pool(POOL_BYTES)
            self._base = self.pool.ctypes.data
        if self._store.register_buffer(self._base, POOL_BYTES):
            raise OSError("register_buffer failed")

    def modes(self, load: Load) -> Sequence[str]:
        return (INTO, BUFFER) if load.op == "get" else (INTO,)

    def prepared(self, batch: Batch, load: Load, mode: str) -> Call:
        addresses = [self._base + offset for offset in batch.offsets]
        return mode, list(batch.keys), addresses, [batch.length] * len(batch.keys)

    def put(self, call: Call) -> None:
        _, keys, addresses, lengths = call
        if len(keys) == 1:
            results = [self._store.put_from(keys[0], addresses[0], lengths[0])]
        else:
            results = self._store.batch_put_from(keys, addresses, lengths)
        if any(results):
            raise OSError(f"put gave {min(results)}")

    def get(self, call: Call) -> Sequence[Any] | None:
        mode, keys, addresses, lengths = call
        if mode == BUFFER:
            one = len(keys) == 1
            return [self._store.get_buffer(keys[0])] if one else self._store.batch_get_buffer(keys)
        if len(keys) == 1:
            results = [self._store.get_into(keys[0], addresses[0], lengths[0])]
        else:
            results = self._store.batch_get_into(keys, addresses, lengths)
        if results != lengths:
            raise OSError(f"get gave {min(results)}")
        return None

    def exists(self, call: Call) -> bool:
        return bool(self._store.is_exist(call[1][0]) == 1)

    def remove(self, keys: Sequence[str]) -> None:
        results = self._store.batch_remove(list(keys), True)  # True: also values that were just read
        if any(results):
            raise OSError(f"remove gave {min(results)}")

    def close(self) -> None:
        self._store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("master")
    parser.add_argument("segment_bytes", type=int)
    parser.add_argument("status", type=int, help="file descriptor to report on")
    arguments = parser.parse_args()
    store = connected(arguments.master, arguments.segment_bytes)
    child_process.write_report(arguments.status, child_process.StartReady({}))
    signal.sigwait({signal.SIGTERM})
    store.close()


if __name__ == "__main__":
    main()
