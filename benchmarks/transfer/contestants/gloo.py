"""torch.distributed over gloo: one isend / irecv per block. For a READ, the target calls isend."""

import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.transfer import contestant
from benchmarks.transfer.contestant import private_pool
from benchmarks.transfer.workload import LOCAL, REMOTE, Load, Offsets

TARGET, INITIATOR = 0, 1
TIMEOUT = timedelta(seconds=20)


def _join(port: int, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=TIMEOUT)


class _Ends:
    """One process's end of a sweep's messages."""

    def __init__(self, pool: torch.Tensor, peer: int, end: int) -> None:
        self._pool, self._peer, self._end = pool, peer, end

    def tensors(self, batch: Offsets, block_bytes: int) -> list[torch.Tensor]:
        return [self._pool[at : at + block_bytes] for at in batch[..., self._end].flatten().tolist()]

    def post(self, blocks: list[torch.Tensor], *, sends: bool) -> list[Any]:
        start = dist.isend if sends else dist.irecv
        return [start(block, self._peer) for block in blocks]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._ends = _Ends(torch.from_numpy(self.pool), INITIATOR, REMOTE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    def hello(self) -> dict[str, Any]:
        return {"port": self._port}

    def connect(self, other: dict[str, Any]) -> None:
        _join(self._port, TARGET)

    def serve(self, load: Load, mode: str, stopped: Callable[[], bool]) -> None:
        batches = [self._ends.tensors(batch, load.block_bytes) for batch in load.batches()]
        # With one batch in flight, the initiator requests each batch; otherwise it requests a whole sweep.
        asked = cycle([[batch] for batch in batches] if load.outstanding == 1 else [batches])
        while _told():
            self._answer(load, next(asked))

    def _answer(self, load: Load, batches: list[list[torch.Tensor]]) -> None:
        pending: deque[list[Any]] = deque()
        for batch in batches:
            if len(pending) == load.outstanding:
                _wait(pending.popleft())
            pending.append(self._ends.post(batch, sends=load.op == "read"))
        for works in pending:
            _wait(works)


def _told() -> bool:
    go_on = torch.zeros(1, dtype=torch.uint8)
    dist.recv(go_on, INITIATOR)
    return bool(go_on.item())


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = private_pool()
        self._ends = _Ends(torch.from_numpy(self.pool), TARGET, LOCAL)

    def connect(self, other: dict[str, Any]) -> None:
        _join(other["port"], INITIATOR)

    def prepared(self, batch: Offsets) -> list[torch.Tensor]:
        return self._ends.tensors(batch, self.load.block_bytes)

    def post(self, batch: list[torch.Tensor]) -> list[Any]:
        return self._ends.post(batch, sends=self.load.op == "write")

    def wait(self, posted: list[Any]) -> None:
        _wait(posted)

    def sweep(self) -> None:
        if self.load.outstanding == 1:
            for batch in self.batches:
                self.once(batch)
        else:
            self._tell(1)
            super().sweep()

    def once(self, batch: list[torch.Tensor]) -> None:
        self._tell(1)
        super().once(batch)

    def done(self) -> None:
        self._tell(0)
        super().done()

    @staticmethod
    def _tell(go_on: int) -> None:
        dist.send(torch.tensor([go_on], dtype=torch.uint8), TARGET)
