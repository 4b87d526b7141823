"""Whether landed blocks contain what their writer says, read from the pool's memory.

Knows the layout, not leases. Only the valid tokens of a block count: what lies behind them is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decode_worker.actions import LandedBlock
from protocol.checksum import checksum
from protocol.ids import BlockId
from protocol.layout import KvLayout


class BlockVerifier:
    """Safe to call from any thread: it only reads."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int) -> None:
        used = np.frombuffer(memory, dtype=np.uint8, count=layout.pool_bytes(num_blocks))
        shape = (layout.pieces_per_block, num_blocks, layout.piece_bytes)
        self._pieces = used.reshape(shape)
        self._layout = layout

    def num_bytes(self, blocks: Sequence[LandedBlock]) -> int:
        """Bytes that checking these blocks reads."""
        num_tokens = sum(block.num_tokens for block in blocks)
        return num_tokens * self._layout.token_bytes * self._layout.pieces_per_block

    def corrupt(self, blocks: Sequence[LandedBlock]) -> tuple[int, ...]:
        """Indexes of the blocks whose content does not match."""
        return tuple(
            block.index
            for block in blocks
            if self.checksum(block.block, block.num_tokens) != block.checksum
        )

    def checksum(self, block: BlockId, num_tokens: int) -> int:
        """Of a block's first tokens."""
        # One gather and one pass: hashing piece by piece would cost a call per piece.
        valid = self._pieces[:, block, : num_tokens * self._layout.token_bytes]
        return checksum((np.ascontiguousarray(valid).data,))
