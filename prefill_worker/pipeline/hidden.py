"""The way of hidden states from one stage's memory to the next one's, over the transfer engine.

A stage that is not the first has an inbox: a few slots of memory that its predecessor may write. Step n uses slot
n mod slots; there are as many as steps can be under way, so a slot is free again before it is written. Knows no layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.checksum import checksum
from protocol.errors import IntegrityError
from transfer import Op, RemoteSegment, Transfer, TransferEngine
from transfer.patience import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTarget:
    """An inbox as its predecessor sees it."""

    transfer_address: str
    segment_id: int
    window_id: int
    slot_bytes: int
    num_slots: int

    def offset(self, step: int) -> int:
        """Of a step's slot."""
        return step % self.num_slots * self.slot_bytes


class HiddenInbox:
    """Where hidden states arrive. The window stays open as long as the transfer engine."""

    def __init__(
        self, transfer: TransferEngine, *, row_bytes: int, slot_rows: int, num_slots: int
    ) -> None:
        """`row_bytes`: of one token's hidden states."""
        slot_bytes = row_bytes * slot_rows
        nbytes = slot_bytes * num_slots
        self._row_bytes = row_bytes
        segment = transfer.allocate(nbytes, name="hidden states")
        self._buffer = segment.buffer
        self.target = HiddenTarget(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            window_id=transfer.open_window(segment, [(0, nbytes)]),
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )

    def verified(self, step: int, num_tokens: int, expected: int) -> memoryview:
        """What the predecessor wrote for this step. Raises IntegrityError when it had something else."""
        start = self.target.offset(step)
        rows = self._buffer[start : start + num_tokens * self._row_bytes]
        if checksum((rows,)) != expected:
            raise IntegrityError(f"hidden states of step {step} arrived corrupt")
        return rows


class HiddenOutbox:
    """Where a stage leaves hidden states, and how they go on."""

    def __init__(
        self, transfer: TransferEngine, target: HiddenTarget, *, row_bytes: int, patience: Patience
    ) -> None:
        self._transfer = transfer
        self._target = target
        self._row_bytes = row_bytes
        self._patience = patience
        self._segment = transfer.allocate(target.slot_bytes * target.num_slots)

    def slot(self, step: int) -> memoryview:
        """To be filled before `send`."""
        start = self._target.offset(step)
        return self._segment.buffer[start : start + self._target.slot_bytes]

    def send(self, step: int, num_tokens: int) -> int:
        """Writes a step's rows; on return they have arrived. Gives their checksum. For the engine's thread: waking
        another one would take longer than most writes, and steps stay in order. Raises what the transfer engine
        raises."""
        offset, nbytes = self._target.offset(step), num_tokens * self._row_bytes
        made = checksum((self.slot(step)[:nbytes],))
        remote = RemoteSegment(self._target.transfer_address, self._target.segment_id)
        write = Transfer(
            Op.WRITE, self._segment, offset, remote, offset, nbytes, self._target.window_id
        )
        self._transfer.run([write], deadline_s=self._patience.deadline_s(nbytes))
        return made
