"""Zeroes KV blocks before another request gets them (`--zero-kv-blocks`). Host memory only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from protocol.ids import BlockId
from protocol.layout import KvLayout


class BlockMemory:
    """Zeroes blocks of a pool of `num_blocks` blocks in `layout` when it is called."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int) -> None:
        """Raises ValueError if `memory` is too small or read-only."""
        needed = layout.pool_bytes(num_blocks)
        if memory.nbytes < needed or memory.readonly:
            raise ValueError(f"{num_blocks} blocks to be zeroed need {needed} writable bytes")
        flat = np.frombuffer(memory, np.uint8, needed)
        self._bytes = flat.reshape(layout.pieces_per_block, num_blocks, layout.piece_bytes)

    def __call__(self, blocks: Sequence[BlockId]) -> None:
        for first, end in runs_of(blocks):
            self._bytes[:, first:end] = 0


def runs_of(blocks: Sequence[BlockId]) -> Iterator[tuple[BlockId, BlockId]]:
    """Yields (first, last + 1) of each run of consecutive blocks, in the order of `blocks`."""
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[begin], blocks[index - 1] + 1
            begin = index
