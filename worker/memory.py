"""A worker's KV pool as bytes: its registered segment, in the layout of `protocol.layout`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.staging import InPlace, Staging
from kvstore.client.spots import Spots, spots_of
from protocol.ids import BlockId
from protocol.layout import KvLayout
from transfer import Segment


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Memory of a worker's own block pool."""

    segment: Segment
    layout: KvLayout
    num_blocks: int
    first_piece: int = 0
    """Index of the pool's first piece among the target's pieces; above 0 for a later pipeline stage."""
    staging: Staging = field(default_factory=InPlace)
    """Copies between the segment and the memory that the engine computes from."""

    @property
    def piece_stride(self) -> int:
        """Bytes from one piece of a block to its next piece."""
        return self.num_blocks * self.layout.piece_bytes

    def spots_of(self, blocks: Sequence[BlockId]) -> Spots:
        """Returns all pieces of each block, in the order of a stored object."""
        return spots_of(self.segment, self.layout, self.num_blocks, blocks)
