"""Copies KV between a pool on a GPU and host memory, layer by layer, while the GPU computes.

Both have the layout of `protocol.kv_blocks`. The host memory is registered with the transfer engine and not pinned, so
copies go through a ring of pinned slots. The GPU's copy engines copy between pool and slots, on separate streams, after
the work that was submitted before the request; the caller's thread copies between slots and host memory. Rule: the
caller holds the blocks until the copy is done. Does not know the owners of blocks. On a CPU all copies are immediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from moonserve.engine.cuda.streams import Event, make_stream, record_event, to_device, wait_for
from moonserve.engine.kv_cache.tensors import KvTensors

Stored = Callable[[], None]


_Slot = torch.Tensor
"""Pinned memory, [2, blocks_per_slot, block_size, kv_heads, head_dim]: K and V of some blocks of one layer."""


@dataclass(frozen=True, slots=True)
class _Storing:
    """A slot that the GPU fills or has filled."""

    slot: _Slot
    layer: int
    blocks: torch.Tensor
    filled: Event | None  # None = filled
    stored: Stored | None  # callback, in the last part of a request only


@dataclass(frozen=True, slots=True)
class _Loading:
    """A slot that the GPU reads."""

    slot: _Slot
    read: Event | None


class StagingRing:
    """Ring of pinned slots between `pool` and host `memory` for as many blocks. Not thread-safe: one caller, such as
    the engine's thread."""

    def __init__(self, pool: KvTensors, memory: memoryview, *, blocks_per_slot: int = 16, num_slots: int = 8) -> None:
        self._pool = pool
        self._host = KvTensors(pool.layout, pool.num_blocks, memory)
        self._blocks_per_slot = blocks_per_slot
        self._on_gpu = pool.device.type == "cuda"
        # One stream per direction, since each direction has its own copy engine.
        self._outward: Any = make_stream(pool.device) if self._on_gpu else None
        self._inward: Any = make_stream(pool.device) if self._on_gpu else None
        self._free = [self._make_slot() for _ in range(num_slots)]
        self._storing: deque[_Storing] = deque()
        self._loading: deque[_Loading] = deque()

    def _make_slot(self) -> _Slot:
        shape = (2, self._blocks_per_slot, *self._pool.keys[0].shape[1:])
        return torch.empty(shape, dtype=self._pool.keys[0].dtype, pin_memory=self._on_gpu)

    # -- from the GPU

    def store(self, layer: int, blocks: Sequence[int], stored: Stored) -> None:
        """Starts copying a layer's K and V of `blocks` to the host, after the work submitted before. A later call of
        this object calls `stored` once they are there. Waits for older copies if the ring is full."""
        parts = list(self._parts(blocks))
        for number, part in enumerate(parts):
            slot = self._take()
            with self._beside(self._outward):
                own = to_device(part, self._pool.device)
                for place, piece in zip(slot, self._pieces(self._pool, layer), strict=True):
                    place[: len(part)].copy_(piece.index_select(0, own), non_blocking=True)
                filled = record_event() if self._on_gpu else None
            is_last = number == len(parts) - 1
            self._storing.append(_Storing(slot, layer, part, filled, stored if is_last else None))

    def flush(self, *, wait: bool) -> None:
        """Moves filled slots to host memory, in the order of the requests. `wait`: also waits for all slots that are
        not filled yet."""
        while self._storing and (wait or _is_reached(self._storing[0].filled)):
            self._flush_oldest()

    def _flush_oldest(self) -> None:
        oldest = self._storing.popleft()
        if oldest.filled is not None:
            oldest.filled.synchronize()
        places = self._pieces(self._host, oldest.layer)
        for place, piece in zip(oldest.slot, places, strict=True):
            piece.index_copy_(0, oldest.blocks, place[: len(oldest.blocks)])
        self._free.append(oldest.slot)
        if oldest.stored is not None:
            oldest.stored()

    # -- to the GPU

    def load(self, layer: int, blocks: Sequence[int]) -> Callable[[], None]:
        """Starts copying a layer's K and V of `blocks` from the host to the pool. Work that is submitted after a call
        of the returned function waits for them. Waits for older copies if the ring is full."""
        arrived: Event | None = None
        for part in self._parts(blocks):
            slot = self._take()
            for place, piece in zip(slot, self._pieces(self._host, layer), strict=True):
                torch.index_select(piece, 0, part, out=place[: len(part)])
            with self._beside(self._inward):
                own = to_device(part, self._pool.device)
                for place, piece in zip(slot, self._pieces(self._pool, layer), strict=True):
                    piece.index_copy_(0, own, to_device(place[: len(part)], self._pool.device))
                arrived = record_event() if self._on_gpu else None
            self._loading.append(_Loading(slot, arrived))

        def wait() -> None:
            if arrived is not None:
                wait_for(arrived, self._pool.device)

        return wait

    # -- whole blocks

    def store_all(self, blocks: Sequence[int]) -> None:
        """Copies all layers of `blocks` to the host and waits for the end."""
        for layer in range(self._pool.layout.num_layers):
            self.store(layer, blocks, _nobody)
            self.flush(wait=False)
        self.flush(wait=True)

    def load_all(self, blocks: Sequence[int], layers: range | None = None) -> None:
        """Copies `layers` (None = all) of `blocks` to the pool and waits for the end."""
        for layer in range(self._pool.layout.num_layers) if layers is None else layers:
            self.load(layer, blocks)
        while self._loading:
            self._free_oldest_loading()

    # -- the ring

    def _take(self) -> _Slot:
        """Returns a free slot, waiting for the oldest copy if there is none."""
        while self._loading and (not self._free or _is_reached(self._loading[0].read)):
            self._free_oldest_loading()
        if not self._free:
            self._flush_oldest()
        return self._free.pop()

    def _free_oldest_loading(self) -> None:
        oldest = self._loading.popleft()
        if oldest.read is not None:
            oldest.read.synchronize()
        self._free.append(oldest.slot)

    def _parts(self, blocks: Sequence[int]) -> Iterator[torch.Tensor]:
        yield from torch.split(torch.tensor(blocks, dtype=torch.int64), self._blocks_per_slot)

    def _beside(self, stream: Any) -> AbstractContextManager[Any]:
        """Returns a context that runs on `stream`, after the work submitted to the current stream so far."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    @staticmethod
    def _pieces(pool: KvTensors, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return pool.keys[layer], pool.values[layer]


def _is_reached(event: Event | None) -> bool:
    return event is None or event.query()


def _nobody() -> None:
    """Callback that does nothing."""
