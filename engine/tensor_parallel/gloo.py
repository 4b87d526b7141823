"""Ranks that reach each other by torch.distributed's gloo: where nothing can be compiled, and on request.

Parts are gathered and then added by everybody, since an all-reduce of gloo adds in an order that depends on where in a
tensor an element lies.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.tensor_parallel.base import PATIENCE_S
from protocol.errors import PeerLost

_dist: Any = dist  # whose stubs lack most of what is used here


class GlooRanks:
    """`Ranks` of one host, which find each other by a file in a folder that none of them has used before."""

    name = "gloo"

    def __init__(self, meeting: Path, *, rank: int, size: int) -> None:
        self._meeting = meeting
        self._rank, self._size = rank, size
        self._group: Any = None

    def connect(self) -> None:
        store = _dist.FileStore(str(self._meeting), self._size)
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=PATIENCE_S)
        try:
            self._group = _dist.ProcessGroupGloo(store, self._rank, self._size, options)
        except RuntimeError as error:
            raise _lost(error) from error

    def add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        parts = self._all(part)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        hidden.copy_(total.add_(hidden))

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = self._all(part)
        return parts if self._rank == 0 else []

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None, "not connected"
        parts = [torch.empty_like(part) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return parts


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"tensor parallelism: {error}")
