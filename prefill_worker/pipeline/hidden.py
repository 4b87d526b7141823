"""The way of hidden states from one stage's memory to the next one's, over the transfer engine.

A stage that is not the last leaves them in slots, each with a header that says of which step they are. The next one is
told of a step when it begins, and looks for its header: READs, which on one host are copies without a message. So
nothing is said and nobody woken between two stages, which took longer than a short prompt can spare (LOG.md). Step n
uses slot n mod slots; there are as many as steps can be under way, so a slot has been read before it is filled again.
Headers carry their maker's checksum, as blocks do. Knows no layers.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from protocol.checksum import checksum
from protocol.errors import IntegrityError, PeerLost
from transfer import Op, RemoteSegment, Transfer, TransferEngine
from transfer.patience import Patience

HEADER_BYTES = 64  # a cache line, so that rows begin at one
_HEADER = struct.Struct("<QQQ")  # step, checksum of the rows, whether there are any
_STEP = struct.Struct("<Q")
# Who has waited looks again after a fiftieth of that: a wait grows by 2 % at most, and a long one costs no core.
_PAUSE_PER_WAIT = 0.02
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenSource:
    """An outbox as the next stage sees it."""

    transfer_address: str
    segment_id: int
    slot_bytes: int  # of a header and rows
    num_slots: int

    def offset(self, step: int) -> int:
        """Of a step's slot."""
        return step % self.num_slots * self.slot_bytes


class HiddenOutbox:
    """Where a stage leaves hidden states. Steps count from 1."""

    def __init__(
        self, transfer: TransferEngine, *, row_bytes: int, slot_rows: int, num_slots: int
    ) -> None:
        """`row_bytes`: of one token's hidden states."""
        slot_bytes = HEADER_BYTES + -(-row_bytes * slot_rows // HEADER_BYTES) * HEADER_BYTES
        segment = transfer.allocate(slot_bytes * num_slots, readable=True, name="hidden states")
        self._buffer = segment.buffer
        self._row_bytes = row_bytes
        self.source = HiddenSource(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )

    def rows(self, step: int) -> memoryview:
        """To be filled before `leave`."""
        start = self.source.offset(step)
        return self._buffer[start + HEADER_BYTES : start + self.source.slot_bytes]

    def leave(self, step: int, num_tokens: int) -> None:
        """The next stage may have so many rows."""
        self._tell(step, checksum((self.rows(step)[: num_tokens * self._row_bytes],)), 1)

    def leave_nothing(self, step: int) -> None:
        """This stage could not compute the step, so nobody behind it can."""
        self._tell(step, 0, 0)

    def _tell(self, step: int, rows_checksum: int, are_there: int) -> None:
        """The step last: who finds it finds the rest."""
        start = self.source.offset(step)
        _HEADER.pack_into(self._buffer, start, 0, rows_checksum, are_there)
        _STEP.pack_into(self._buffer, start, step)


class HiddenInbox:
    """How a stage gets what the one before left."""

    def __init__(
        self,
        transfer: TransferEngine,
        source: HiddenSource,
        *,
        row_bytes: int,
        patience: Patience,
        longest_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`longest_wait_s`: for the stage before to have computed a step."""
        self._transfer = transfer
        self._source = source
        self._row_bytes = row_bytes
        self._patience = patience
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._sleep = sleep
        self._segment = transfer.allocate(source.slot_bytes)

    def fetch(self, step: int, num_tokens: int) -> memoryview:
        """The rows of a step, until the next call, once they are there. Blocks: for the engine's thread. Raises
        IntegrityError when their maker had others or none, PeerLost when it took too long, and what the transfer
        engine raises."""
        self._wait_for(step)
        nbytes = num_tokens * self._row_bytes
        _, expected, are_there = self._read(step, HEADER_BYTES + nbytes)
        if not are_there:
            raise IntegrityError(f"the stage before has no hidden states for step {step}")
        rows = self._segment.buffer[HEADER_BYTES : HEADER_BYTES + nbytes]
        if checksum((rows,)) != expected:
            raise IntegrityError(f"hidden states of step {step} arrived corrupt")
        return rows

    def _wait_for(self, step: int) -> None:
        began = self._clock()
        while self._read(step, HEADER_BYTES)[0] != step:
            waited = self._clock() - began
            if waited > self._longest_wait_s:
                raise PeerLost(f"no hidden states of step {step} within {waited:.0f} s")
            self._sleep(min(max(waited * _PAUSE_PER_WAIT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _read(self, step: int, nbytes: int) -> tuple[int, int, int]:
        """The beginning of a step's slot as it is now; what its header says."""
        source = self._source
        remote = RemoteSegment(source.transfer_address, source.segment_id)
        read = Transfer(Op.READ, self._segment, 0, remote, source.offset(step), nbytes)
        self._transfer.run([read], deadline_s=self._patience.deadline_s(nbytes))
        return _HEADER.unpack_from(self._segment.buffer)
