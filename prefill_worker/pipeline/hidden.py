"""The way of hidden states from one stage's memory to the next one's, over the transfer engine.

A stage that is not the last leaves them in slots that the next one READs when it is told to: on one host that is a copy
without a message, and nobody is woken. Step n uses slot n mod slots; there are as many as steps can be under way, so a
slot has been read before it is filled again. They carry their maker's checksum, as blocks do. Knows no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.checksum import checksum
from protocol.errors import IntegrityError
from transfer import Op, RemoteSegment, Transfer, TransferEngine
from transfer.patience import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenSource:
    """An outbox as the next stage sees it."""

    transfer_address: str
    segment_id: int
    slot_bytes: int
    num_slots: int

    def offset(self, step: int) -> int:
        """Of a step's slot."""
        return step % self.num_slots * self.slot_bytes


class HiddenOutbox:
    """Where a stage leaves hidden states."""

    def __init__(
        self, transfer: TransferEngine, *, row_bytes: int, slot_rows: int, num_slots: int
    ) -> None:
        """`row_bytes`: of one token's hidden states."""
        slot_bytes = row_bytes * slot_rows
        segment = transfer.allocate(slot_bytes * num_slots, readable=True, name="hidden states")
        self._buffer = segment.buffer
        self._row_bytes = row_bytes
        self.source = HiddenSource(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )

    def slot(self, step: int) -> memoryview:
        """To be filled."""
        start = self.source.offset(step)
        return self._buffer[start : start + self.source.slot_bytes]

    def checksum(self, step: int, num_tokens: int) -> int:
        """Of what lies there."""
        return checksum((self.slot(step)[: num_tokens * self._row_bytes],))


class HiddenInbox:
    """How a stage gets what the one before left."""

    def __init__(
        self, transfer: TransferEngine, source: HiddenSource, *, row_bytes: int, patience: Patience
    ) -> None:
        self._transfer = transfer
        self._source = source
        self._row_bytes = row_bytes
        self._patience = patience
        self._segment = transfer.allocate(source.slot_bytes)

    def fetch(self, step: int, num_tokens: int, expected: int) -> memoryview:
        """The rows of a step, until the next call. Blocks: for the engine's thread. Raises what the transfer engine
        raises, and IntegrityError when their maker had others."""
        source, nbytes = self._source, num_tokens * self._row_bytes
        remote = RemoteSegment(source.transfer_address, source.segment_id)
        read = Transfer(Op.READ, self._segment, 0, remote, source.offset(step), nbytes)
        self._transfer.run([read], deadline_s=self._patience.deadline_s(nbytes))
        rows = self._segment.buffer[:nbytes]
        if checksum((rows,)) != expected:
            raise IntegrityError(f"hidden states of step {step} arrived corrupt")
        return rows
