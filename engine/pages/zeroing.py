"""The bytes of blocks, for pools that hand out empty ones: nobody reads what another's request has left there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.block_runs import runs_of


class BlockMemory:
    """Memory of `num_blocks` blocks in `pieces` pieces each, laid out as `protocol.layout` says: all blocks' first
    pieces, then all second ones, and so on. One piece is a block-major pool. Called with blocks, it zeroes them."""

    def __init__(self, memory: memoryview, num_blocks: int, piece_bytes: int, pieces: int) -> None:
        """Raises ValueError when `memory` is too small or cannot be written."""
        needed = pieces * num_blocks * piece_bytes
        if memory.nbytes < needed or memory.readonly:
            raise ValueError(f"{num_blocks} blocks to be zeroed need {needed} writable bytes")
        flat = np.frombuffer(memory, np.uint8, needed)
        self._bytes = flat.reshape(pieces, num_blocks, piece_bytes)

    def __call__(self, blocks: Sequence[int]) -> None:
        for first, end in runs_of(blocks):
            self._bytes[:, first:end] = 0
