"""This project's transfer engine. Mode "async" submits batches, with as many in flight as for every contestant; "sync"
calls `run` for one batch after the other in the caller's thread.
"""

from typing import Any

import numpy as np

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import SYNC
from benchmarks.transfer.workload import LOCAL, POOL_BYTES, REMOTE, Offsets
from moonserve.transfer import Batch, Op, RemoteSegment, ScatterTransfer, Transfer, TransferEngine
from moonserve.transfer.config import TransferOptions

TOKEN = "benchmark"
DEADLINE_S = 20.0

Transfers = list[Transfer | ScatterTransfer]


def engine(options: dict[str, Any]) -> TransferEngine:
    chosen = TransferOptions(
        transports=(options["transport"],),
        checksums=options["checksums"],
        **options.get("more", {}),
    )
    started = TransferEngine(cluster_token=TOKEN, options=chosen)
    started.start()
    return started


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine = engine(options)
        self._segment = self._engine.allocate(POOL_BYTES, readable=True)
        self.pool = np.frombuffer(self._segment.buffer, np.uint8)
        self._window_id = self._engine.open_window(self._segment, [(0, POOL_BYTES)])

    def hello(self) -> dict[str, Any]:
        return {
            "address": self._engine.address,
            "segment_id": self._segment.segment_id,
            "window_id": self._window_id,
        }


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine = engine(options)
        self._segment = self._engine.allocate(POOL_BYTES)
        self.pool = np.frombuffer(self._segment.buffer, np.uint8)

    def connect(self, other: dict[str, Any]) -> None:
        self._remote = RemoteSegment(other["address"], other["segment_id"])
        self._window_id = other["window_id"]

    def prepared(self, batch: Offsets) -> Transfers:
        make = self._one if self.load.blocks == 1 else self._scattered
        return [make(request) for request in batch]

    def _one(self, request: Offsets) -> Transfer:
        remote, local = request[0, REMOTE], request[0, LOCAL]
        return Transfer(
            op=Op(self.load.op),
            local=self._segment,
            local_offset=int(local),
            remote=self._remote,
            remote_offset=int(remote),
            length=self.load.block_bytes,
            window_id=self._window_id if self.load.op == "write" else None,
        )

    def _scattered(self, request: Offsets) -> ScatterTransfer:
        lengths = np.full((len(request), 1), self.load.block_bytes, np.int64)
        return ScatterTransfer(
            op=Op(self.load.op),
            local=self._segment,
            remote=self._remote,
            rows=np.hstack([request, lengths]),
            window_id=self._window_id if self.load.op == "write" else None,
        )

    def post(self, batch: Transfers) -> Batch:
        return self._engine.submit(batch, deadline_s=DEADLINE_S)

    def wait(self, posted: Batch) -> None:
        posted.wait()

    def once(self, batch: Transfers) -> None:
        if self.mode == SYNC:
            self._engine.run(batch, deadline_s=DEADLINE_S)
        else:
            super().once(batch)
