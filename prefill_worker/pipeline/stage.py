"""One stage of a group at work: its own layers of each step, from hidden states to hidden states or tokens.

The same for leader and followers, and for a worker alone, whose stage has all layers. The KV of the stage's layers
leaves for the decode worker while later layers compute. Knows neither requests' lives nor who drives it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from engine.batch import HiddenStates, Sampled
from prefill_worker.actions import SendBlocks, SlicePlan
from prefill_worker.landing import Route, StepWriter, Submit, block_runs
from protocol.checksum import checksum
from protocol.errors import IntegrityError, PeerLost
from protocol.pb import pipeline_pb2
from transfer import Op, RemoteSegment, Transfer, TransferEngine
from transfer.config import Patience
from worker.memory import KvMemory

if TYPE_CHECKING:
    from engine.runtime import EngineThread  # imports torch

HEADER_BYTES = 64  # a cache line, so that rows begin at one
_HEADER = struct.Struct("<QQQ")  # step, checksum of the rows, whether there are any
_STEP = struct.Struct("<Q")
# Who has waited looks again after a fiftieth of that: a wait grows by 2 % at most, and a long one costs no core.
_PAUSE_PER_WAIT = 0.02
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


class HiddenOutbox:
    """Where a stage leaves hidden states for the next one, in slots with a header that says of which step they are.

    The next stage is told of a step when it begins, and looks for its header with READs, which on one host are copies
    without a message: waking somebody between two stages took longer than a short prompt can spare (LOG.md). Step n,
    from 1, uses slot n mod slots; there are as many as steps can be under way. Headers carry their maker's checksum."""

    def __init__(self, transfer: TransferEngine, *, row_bytes: int, slot_rows: int, num_slots: int) -> None:
        """`row_bytes`: of one token's hidden states."""
        slot_bytes = HEADER_BYTES + -(-row_bytes * slot_rows // HEADER_BYTES) * HEADER_BYTES
        segment = transfer.allocate(slot_bytes * num_slots, readable=True, name="hidden states")
        self._buffer = segment.buffer
        self._row_bytes = row_bytes
        self.source = pipeline_pb2.HiddenSource(
            transfer_address=transfer.address,
            segment_id=segment.segment_id,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
        )

    def rows(self, step: int) -> memoryview:
        """To be filled before `leave`."""
        start = _offset(self.source, step)
        return self._buffer[start + HEADER_BYTES : start + self.source.slot_bytes]

    def leave(self, step: int, num_tokens: int) -> None:
        """The next stage may have so many rows."""
        self._tell(step, checksum((self.rows(step)[: num_tokens * self._row_bytes],)), 1)

    def leave_nothing(self, step: int) -> None:
        """This stage could not compute the step, so nobody behind it can."""
        self._tell(step, 0, 0)

    def _tell(self, step: int, rows_checksum: int, are_there: int) -> None:
        """The step last: who finds it finds the rest."""
        start = _offset(self.source, step)
        _HEADER.pack_into(self._buffer, start, 0, rows_checksum, are_there)
        _STEP.pack_into(self._buffer, start, step)


class HiddenInbox:
    """How a stage gets what the one before left."""

    def __init__(
        self,
        transfer: TransferEngine,
        source: pipeline_pb2.HiddenSource,
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
        read = Transfer(Op.READ, self._segment, 0, remote, _offset(source, step), nbytes)
        self._transfer.run([read], deadline_s=self._patience.deadline_s(nbytes))
        return _HEADER.unpack_from(self._segment.buffer)


def _offset(source: pipeline_pb2.HiddenSource, step: int) -> int:
    """Of a step's slot in an outbox."""
    return step % source.num_slots * source.slot_bytes


# Longer than a step takes on any machine that could serve; one that is stopped must not hold requests for ever.
STEP_TIMEOUT_S = 60.0

Checksums = list[tuple[tuple[int, int], ...]]
"""Per slice: (index in the block table, checksum of the stage's layers) of the blocks that it completes."""


class OwnStage:
    """This process's share of the layers. `inbox` is None for the first stage, `outbox` for the last."""

    def __init__(
        self,
        engine: EngineThread,
        memory: KvMemory,
        submit: Submit,
        *,
        inbox: HiddenInbox | None = None,
        outbox: HiddenOutbox | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.submit = submit
        self.inbox = inbox
        self.outbox = outbox

    def begin(
        self,
        plans: Sequence[SlicePlan],
        on_prefix: Callable[[int], None] | None = None,
        *,
        step: int = 0,
    ) -> OwnStep:
        """Steps are computed in the order in which `OwnStep.compute` is called; `step` numbers a group's.
        `on_prefix(layer)` waits, in the engine's thread, for what a layer looks at; it may raise PrefixLate."""
        return OwnStep(self, step, plans, on_prefix)

    async def send_blocks(self, action: SendBlocks) -> None:
        """On return the stage's layers of whole blocks have arrived. Raises MoonserveError."""
        layout = self.memory.layout
        route = Route(self.memory, action.landing, block_runs(action.pairs, layout))
        await self.submit(route.transfer(range(layout.pieces_per_block)))


class OwnStep:
    """One step at this stage."""

    def __init__(
        self,
        stage: OwnStage,
        step: int,
        plans: Sequence[SlicePlan],
        on_prefix: Callable[[int], None] | None,
    ) -> None:
        self._num_tokens = sum(plan.slice.num_tokens for plan in plans)
        self._stage = stage
        self._step = step
        self._slices = [plan.slice for plan in plans]
        self._on_prefix = on_prefix
        self._writer = StepWriter(stage.memory, plans, stage.submit)

    @property
    def num_slices(self) -> int:
        return len(self._slices)

    async def compute(self) -> list[Sampled | None]:
        """On return the hidden states are where the next stage gets them. A stage behind the first waits for those of
        the one before. Raises what engine and transfer engine raise; the stages behind fail then, too."""
        stage = self._stage
        if stage.inbox is None and stage.outbox is None:
            return await stage.engine.execute(self._slices, self._writer.on_layer, before_attention=self._on_prefix)
        try:
            return await stage.engine.execute(
                self._slices, self._writer.on_layer, hidden=self._hidden(stage.inbox, stage.outbox)
            )
        except Exception:
            if stage.outbox is not None:
                stage.outbox.leave_nothing(self._step)
            raise

    def _hidden(self, inbox: HiddenInbox | None, outbox: HiddenOutbox | None) -> HiddenStates:
        step, num_tokens = self._step, self._num_tokens
        return HiddenStates(
            fetch=None if inbox is None else partial(inbox.fetch, step, num_tokens),
            passed_on=None if outbox is None else outbox.rows(step),
            on_passed=None if outbox is None else partial(outbox.leave, step, num_tokens),
        )

    def checksums(self) -> Checksums:
        """After `compute`."""
        return self._writer.checksums()

    def finish(self) -> None:
        """Sends what is left, after `compute`."""
        self._writer.finish()

    async def sent(self, position: int) -> None:
        """Waits until no write of the slice at `position` is under way. Raises the first error."""
        await self._writer.sent(position)
