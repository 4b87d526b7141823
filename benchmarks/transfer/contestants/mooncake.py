"""Mooncake Transfer Engine over TCP: batches of transfers by address, asynchronous ("async") or blocking ("sync")."""

from __future__ import annotations

from typing import Any

from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import SYNC, private_pool
from benchmarks.transfer.workload import LOCAL, POOL_BYTES, REMOTE, Offsets


def _engine(address: int) -> Any:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise OSError("initialize failed")
    if engine.register_memory(address, POOL_BYTES):
        raise OSError("register_memory failed")
    return engine


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._engine = _engine(self.pool.ctypes.data)

    def hello(self) -> dict[str, Any]:
        return {"peer": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self.pool.ctypes.data}


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._engine = _engine(self.pool.ctypes.data)

    def connect(self, other: dict[str, Any]) -> None:
        self._peer, self._base = other["peer"], other["base"]

    def prepared(self, batch: Offsets) -> tuple[list[int], list[int], list[int]]:
        blocks = batch.reshape(-1, 2)
        local = self.pool.ctypes.data + blocks[:, LOCAL]
        remote = self._base + blocks[:, REMOTE]
        return local.tolist(), remote.tolist(), [self.load.block_bytes] * len(blocks)

    def post(self, batch: tuple[list[int], list[int], list[int]]) -> int:
        engine = self._engine
        read = self.load.op == "read"
        start = engine.batch_transfer_async_read if read else engine.batch_transfer_async_write
        posted = int(start(self._peer, *batch))
        if posted <= 0:
            raise OSError(f"batch_transfer_async gave {posted}")
        return posted

    def wait(self, posted: int) -> None:
        if self._engine.get_batch_transfer_status([posted]):
            raise OSError("the batch failed")

    def once(self, batch: tuple[list[int], list[int], list[int]]) -> None:
        if self.mode != SYNC:
            super().once(batch)
            return
        engine = self._engine
        read = self.load.op == "read"
        call = engine.batch_transfer_sync_read if read else engine.batch_transfer_sync_write
        if call(self._peer, *batch):
            raise OSError("batch_transfer_sync failed")
