"""moonserve with many peers, many batches or several rails: the contestants of `scaling`.

The target process has `peers` engines that divide the pool's size, so that the amount of memory and the cache effects
do not depend on their number. Each batch goes to one peer; batches go to the peers in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.transfer import contestant, moonserve
from benchmarks.transfer.moonserve import DEADLINE_S, Transfers
from benchmarks.transfer.workload import LOCAL, POOL_BYTES, REMOTE, Bytes, Load, Offsets
from transfer import Batch, Op, RemoteSegment, Transfer


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    addresses = [f"127.0.0.{number + 1}" for number in range(options["rails"])]
    more = {"rails": addresses} if options["rails"] > 1 else {}
    return {"transport": options["transport"], "checksums": options["checksums"], "more": more}


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engines = [moonserve.engine(engine_options(options)) for _ in range(options["peers"])]
        share = POOL_BYTES // len(self._engines)
        self._segments = [engine.allocate(share, readable=True) for engine in self._engines]
        self._windows = [
            engine.open_window(segment, [(0, share)])
            for engine, segment in zip(self._engines, self._segments, strict=True)
        ]

    def hello(self) -> dict[str, Any]:
        return {
            "peers": [
                (engine.address, segment.segment_id, window)
                for engine, segment, window in zip(self._engines, self._segments, self._windows, strict=True)
            ]
        }

    def fill(self, source: Bytes) -> None:
        for segment, part in zip(self._segments, np.split(source, len(self._segments)), strict=True):
            segment.buffer[:] = part.data

    def landed(self) -> Bytes:
        return np.concatenate([np.frombuffer(segment.buffer, np.uint8) for segment in self._segments])


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._engine = moonserve.engine(engine_options(options))
        self._segment = self._engine.allocate(POOL_BYTES)
        self.pool = np.frombuffer(self._segment.buffer, np.uint8)

    def connect(self, other: dict[str, Any]) -> None:
        self._peers = [
            (RemoteSegment(address, segment_id), window_id) for address, segment_id, window_id in other["peers"]
        ]
        self._share = POOL_BYTES // len(self._peers)

    def prepare(self, load: Load, mode: str) -> None:
        self.load, self.mode = load, mode
        self.outstanding = self.options["outstanding"]
        batches = by_peer(np.concatenate(load.batches()), self._share, load.requests)
        self.batches = [self.prepared(batch) for batch in batches]

    def prepared(self, batch: Offsets) -> Transfers:
        remote, window_id = self._peers[int(batch[0, 0, REMOTE]) // self._share]
        return [
            Transfer(
                op=Op(self.load.op),
                local=self._segment,
                local_offset=local,
                remote=remote,
                remote_offset=there % self._share,
                length=self.load.block_bytes,
                window_id=window_id if self.load.op == "write" else None,
            )
            for there, local in batch[:, 0, [REMOTE, LOCAL]].tolist()
        ]

    def post(self, batch: Transfers) -> Batch:
        return self._engine.submit(batch, deadline_s=DEADLINE_S)

    def wait(self, posted: Batch) -> None:
        posted.wait()


def by_peer(requests: Offsets, share: int, per_batch: int) -> Offsets:
    """Groups the requests of a sweep into batches of one peer each, with the peers in turn."""
    peers = POOL_BYTES // share
    order = np.argsort(requests[:, 0, REMOTE] // share, kind="stable")
    batches = requests[order].reshape(peers, -1, per_batch, *requests.shape[1:])
    return batches.swapaxes(0, 1).reshape(-1, per_batch, *requests.shape[1:])
