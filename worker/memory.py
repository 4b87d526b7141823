"""A worker's KV pool as bytes: its registered segment, laid out as `protocol.layout` says."""

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
    """The own pool's memory."""

    segment: Segment
    layout: KvLayout
    num_blocks: int
    first_piece: int = 0
    """Which of a target's pieces its first one is: a pipeline's stage has some layers only."""
    staging: Staging = field(default_factory=InPlace)
    """Between it and what the engine computes from."""

    @property
    def piece_stride(self) -> int:
        """From one piece of a block to the next."""
        return self.num_blocks * self.layout.piece_bytes

    def spots_of(self, blocks: Sequence[BlockId]) -> Spots:
        """All pieces of each block, in the order of a stored object."""
        return spots_of(self.segment, self.layout, self.num_blocks, blocks)
