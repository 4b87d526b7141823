"""What writers have put into a node's memory, compared with their checksums once nobody can write there any more."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.promises import Landed
from protocol.checksum import checksum
from protocol.keys import BlockKey
from transfer import Segment, TransferEngine

# A thread to verify this much would take longer to wake than the checksum does.
VERIFY_HERE_BYTES = 4 * 2**20


class Landings:
    """Of one segment. Thread-safe."""

    def __init__(self, transfer: TransferEngine, segment: Segment) -> None:
        self._transfer = transfer
        self._memory = segment.buffer

    def can_be_verified_here(self, window_id: int | None, landed: Sequence[Landed]) -> bool:
        """Whether little was written, and the window is closed now because nobody is writing."""
        if sum(item.length for item in landed) > VERIFY_HERE_BYTES:
            return False
        return window_id is None or self._transfer.close_window_if_idle(window_id)

    def close_and_verify(
        self, window_id: int | None, landed: Sequence[Landed]
    ) -> tuple[BlockKey, ...]:
        """As `corrupt`, behind a window that is closed first; blocks."""
        if window_id is not None:
            self._transfer.close_window(window_id)
        return self.corrupt(landed)

    def corrupt(self, landed: Sequence[Landed]) -> tuple[BlockKey, ...]:
        """The keys whose bytes do not match."""
        return tuple(
            item.key
            for item in landed
            if checksum([self._memory[item.offset : item.offset + item.length]]) != item.checksum
        )
