"""Verification of landed blocks: compares their content in the pool's memory with their writer's checksums.

Knows the layout, not leases. Checksums cover only the valid tokens of a block; the bytes behind them are undefined.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from moonserve.decode_worker.decisions.events import LandedBlock
from moonserve.protocol.kv_blocks import KvLayout, checksum, pack_checksums
from moonserve.protocol.request import BlockId

Pieces = npt.NDArray[np.uint8]

INLINE_BYTES = 1 << 20
"""Up to this size, computing checksums (0.1 ms at memory speed) takes less time than passing them to a thread."""


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """Result of verifying landed blocks."""

    corrupt: tuple[int, ...]  # indexes of the blocks that do not match
    checksums: tuple[int, ...] = ()  # whole-block checksums of all blocks, if only those of parts were known


class BlockVerifier:
    """Computes and compares checksums of one pool's blocks. Only reads memory, so any thread may call it."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int) -> None:
        used = np.frombuffer(memory, dtype=np.uint8, count=layout.pool_bytes(num_blocks))
        shape = (layout.pieces_per_block, num_blocks, layout.piece_bytes)
        self._pieces = used.reshape(shape)
        self._layout = layout

    def num_bytes(self, blocks: Sequence[LandedBlock]) -> int:
        """Returns the number of bytes that a check of the given blocks reads."""
        num_tokens = sum(block.num_tokens for block in blocks)
        return num_tokens * self._layout.token_bytes * self._layout.pieces_per_block

    def corrupt(self, blocks: Sequence[LandedBlock]) -> tuple[int, ...]:
        """Returns the indexes of the blocks whose content does not match their checksum."""
        return tuple(block.index for block in blocks if self.checksum(block.block, block.num_tokens) != block.checksum)

    async def verify_async(self, blocks: Sequence[LandedBlock]) -> VerificationResult:
        """Computes `verdict`, in another thread if there are more than INLINE_BYTES to read."""
        if self.num_bytes(blocks) > INLINE_BYTES:
            return await asyncio.to_thread(self.verify, blocks)
        return self.verify(blocks)

    def verify(self, blocks: Sequence[LandedBlock]) -> VerificationResult:
        """Returns the corrupt blocks and, if only checksums of parts are known, the whole blocks' checksums."""
        if not any(block.part_layers for block in blocks):
            return VerificationResult(self.corrupt(blocks))
        found = [self._verify_parts(block) for block in blocks]
        bad = (block.index for block, (is_good, _) in zip(blocks, found, strict=True) if not is_good)
        return VerificationResult(tuple(bad), tuple(whole for _, whole in found))

    def _verify_parts(self, block: LandedBlock) -> tuple[bool, int]:
        """Returns whether all parts match, and the checksum of the same bytes as a whole. Parts that do not cover all
        layers never match."""
        valid = self._valid(block.block, block.num_tokens)
        ends = list(accumulate(block.part_layers))
        parts = [
            checksum((valid[2 * (end - count) : 2 * end].data,))
            for count, end in zip(block.part_layers, ends, strict=True)
        ]
        is_all = ends[-1:] == [self._layout.num_layers]
        return is_all and pack_checksums(parts) == block.checksum, checksum((valid.data,))

    async def checksums(self, blocks: Sequence[BlockId]) -> tuple[int, ...]:
        """Returns the checksums of whole blocks, computed in another thread if they exceed INLINE_BYTES."""
        size = self._layout.block_size

        def make() -> tuple[int, ...]:
            return tuple(self.checksum(block, size) for block in blocks)

        is_long = len(blocks) * self._layout.block_bytes > INLINE_BYTES
        return await asyncio.to_thread(make) if is_long else make()

    def checksum(self, block: BlockId, num_tokens: int) -> int:
        """Returns the checksum of a block's first `num_tokens` tokens."""
        return checksum((self._valid(block, num_tokens).data,))

    def _valid(self, block: BlockId, num_tokens: int) -> Pieces:
        """Returns a copy of a block's first tokens, [pieces, bytes]."""
        # One gather and one hash: hashing piece by piece would cost a call per piece.
        return np.ascontiguousarray(self._pieces[:, block, : num_tokens * self._layout.token_bytes])
