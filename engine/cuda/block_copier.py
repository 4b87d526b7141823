"""Copies KV between a pool on a GPU and host memory, layer by layer, while the GPU computes.

The GPU itself reads and writes the host memory, which is pinned and mapped for it. A kernel of few programs, on a
stream of its own for each direction, begins after the work that was submitted before the request. Scattered blocks move
at the speed of the bus, and most of the GPU stays free for the engine. Rule: the caller holds the blocks until the copy
is done. Does not know the owners of blocks. On a CPU all copies are immediate.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from moonserve.engine.cuda.streams import Event, make_stream, record_event, to_device, wait_for
from moonserve.engine.kv_cache.tensors import KvTensors

Stored = Callable[[], None]


class BlockCopier:
    """Copies between `pool` and `host`, tensors over host memory for as many blocks that the pool's device reaches. Not
    thread-safe: one caller, such as the engine's thread."""

    def __init__(self, pool: KvTensors, host: KvTensors) -> None:
        self._pool = pool
        self._host = host
        self._on_gpu = pool.device.type == "cuda"
        self._outward: Any = make_stream(pool.device) if self._on_gpu else None
        self._inward: Any = make_stream(pool.device) if self._on_gpu else None
        self._storing: deque[tuple[Event | None, Stored]] = deque()

    def store(self, layer: int, blocks: Sequence[int], stored: Stored) -> None:
        """Starts copying a layer's K and V of `blocks` to the host, after the work submitted before. A later call of
        this object calls `stored` once they are there."""
        arrived = self._copy(self._pool, self._host, layer, blocks, self._outward)
        self._storing.append((arrived, stored))

    def flush(self, *, wait: bool) -> None:
        """Reports the layers that were stored, in the order of the requests. `wait`: also waits for all others."""
        while self._storing and (wait or _is_reached(self._storing[0][0])):
            arrived, stored = self._storing.popleft()
            if arrived is not None:
                arrived.synchronize()
            stored()

    def load(self, layer: int, blocks: Sequence[int]) -> Callable[[], None]:
        """Starts copying a layer's K and V of `blocks` from the host to the pool. Work that is submitted after a call
        of the returned function waits for them."""
        arrived = self._copy(self._host, self._pool, layer, blocks, self._inward)

        def wait() -> None:
            if arrived is not None:
                wait_for(arrived, self._pool.device)

        return wait

    def store_all(self, blocks: Sequence[int]) -> None:
        """Copies all layers of `blocks` to the host and waits for the end."""
        for layer in range(self._pool.layout.num_layers):
            self.store(layer, blocks, _nobody)
        self.flush(wait=True)

    def load_all(self, blocks: Sequence[int], layers: range | None = None) -> None:
        """Copies `layers` (None = all) of `blocks` to the pool and waits for the end."""
        for layer in range(self._pool.layout.num_layers) if layers is None else layers:
            self.load(layer, blocks)
        if self._on_gpu:
            self._inward.synchronize()

    def _copy(
        self, source: KvTensors, target: KvTensors, layer: int, blocks: Sequence[int], stream: Any
    ) -> Event | None:
        with self._beside(stream):
            own = to_device(torch.tensor(blocks, dtype=torch.int64), self._pool.device)
            pieces = (source.keys[layer], source.values[layer]), (target.keys[layer], target.values[layer])
            if not self._on_gpu:
                for piece, place in zip(*pieces, strict=True):
                    place.index_copy_(0, own, piece.index_select(0, own))
                return None
            from moonserve.engine.cuda.copy_kernel import copy_blocks  # imports triton

            copy_blocks(*pieces, own)
            return record_event()

    def _beside(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context that runs on `stream`, after the work submitted to the current stream so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context


def _is_reached(event: Event | None) -> bool:
    return event is None or event.query()


def _nobody() -> None:
    """Callback that does nothing."""
