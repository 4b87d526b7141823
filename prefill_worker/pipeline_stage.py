"""Execution of one pipeline stage: its own layers of each step, with hidden states or tokens as input and output.

Leader and followers use it, and so does a worker without a group, whose stage has all layers. The KV of the stage's
layers is sent to the decode worker while later layers compute. Knows neither requests' lives nor its caller.

The functions `…_to_wire` and `…_from_wire` convert between a group's messages and its types. Both ends run the same
program, started together.
"""

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moonserve.engine.model.batch import HiddenStates, PromptScores, Sampled, Slice
from moonserve.prefill_worker.decisions.events import Landing, SendBlocks, SlicePlan
from moonserve.prefill_worker.kv_writes import KvRoute, StepWriter, Submit, block_runs
from moonserve.protocol.errors import IntegrityError, PeerLost
from moonserve.protocol.kv_blocks import checksum, pack_tokens, unpack_tokens
from moonserve.protocol.pb import pipeline_pb2
from moonserve.protocol.request import LeaseId, RequestId, Token
from moonserve.protocol.rpc.wire import (
    from_message,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    to_message,
    token_from_wire,
    token_to_wire,
)
from moonserve.transfer import Op, RemoteSegment, Transfer, TransferEngine
from moonserve.transfer.config import TransferTimeout
from moonserve.worker.process import KvMemory

if TYPE_CHECKING:
    from moonserve.engine.engine import EngineThread  # imports torch


HEADER_BYTES = 64  # a cache line, so that rows are aligned to one
_HEADER = struct.Struct("<QQQ")  # step, checksum of the rows, 1 if there are rows, else 0
_STEP = struct.Struct("<Q")
# A reader polls again after a fiftieth of the time it has waited: a wait grows by 2 % at most, and a long one costs no
# core.
_PAUSE_PER_WAIT = 0.02
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 1e-3


class HiddenOutbox:
    """A stage's memory for the hidden states that the next stage reads, in slots with a header that names the step.

    The next stage knows of a step when the step begins, and polls the header with READs, which on one host are copies
    without a message: waking a process between two stages took too long for short prompts (LOG.md). Step n, from 1,
    uses slot n mod slots; there are as many slots as steps can be in flight. A header has the checksum of its rows."""

    def __init__(self, transfer: TransferEngine, *, row_bytes: int, slot_rows: int, num_slots: int) -> None:
        """`row_bytes` is the size of one token's hidden states."""
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
        """Returns a step's rows, to be filled before `publish`."""
        start = _offset(self.source, step)
        return self._buffer[start + HEADER_BYTES : start + self.source.slot_bytes]

    def publish(self, step: int, num_tokens: int) -> None:
        """Publishes the first `num_tokens` rows of a step to the next stage."""
        self._write_header(step, checksum((self.rows(step)[: num_tokens * self._row_bytes],)), 1)

    def publish_failure(self, step: int) -> None:
        """Reports to the next stage that this stage could not compute the step."""
        self._write_header(step, 0, 0)

    def _write_header(self, step: int, rows_checksum: int, are_there: int) -> None:
        """Writes a header. The step number is written last: a reader that finds it finds the rest."""
        start = _offset(self.source, step)
        _HEADER.pack_into(self._buffer, start, 0, rows_checksum, are_there)
        _STEP.pack_into(self._buffer, start, step)


class HiddenInbox:
    """Reads the hidden states that the stage before left in its outbox."""

    def __init__(
        self,
        transfer: TransferEngine,
        source: pipeline_pb2.HiddenSource,
        *,
        row_bytes: int,
        patience: TransferTimeout,
        longest_wait_s: float,
    ) -> None:
        """`longest_wait_s` is the time that the stage before may take to compute a step."""
        self._transfer = transfer
        self._source = source
        self._row_bytes = row_bytes
        self._patience = patience
        self._longest_wait_s = longest_wait_s
        self._segment = transfer.allocate(source.slot_bytes)

    def fetch(self, step: int, num_tokens: int) -> memoryview:
        """Waits for the rows of a step and returns them; they are valid until the next call. Blocks, so call it in the
        engine's thread. Raises IntegrityError if the rows are corrupt or the stage before has none, PeerLost if they
        take too long, and what the transfer engine raises."""
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
        began = time.monotonic()
        while self._read(step, HEADER_BYTES)[0] != step:
            waited = time.monotonic() - began
            if waited > self._longest_wait_s:
                raise PeerLost(f"no hidden states of step {step} within {waited:.0f} s")
            time.sleep(min(max(waited * _PAUSE_PER_WAIT, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _read(self, step: int, nbytes: int) -> tuple[int, int, int]:
        """Reads the first `nbytes` of a step's slot and returns its header."""
        source = self._source
        remote = RemoteSegment(source.transfer_address, source.segment_id)
        read = Transfer(Op.READ, self._segment, 0, remote, _offset(source, step), nbytes)
        self._transfer.run([read], deadline_s=self._patience.deadline_s(nbytes))
        return _HEADER.unpack_from(self._segment.buffer)


def _offset(source: pipeline_pb2.HiddenSource, step: int) -> int:
    """Returns the offset of a step's slot in an outbox."""
    return step % source.num_slots * source.slot_bytes


# Longer than a step takes on any suitable machine; a stopped process must not hold requests for ever.
STEP_TIMEOUT_S = 60.0

Checksums = list[tuple[tuple[int, int], ...]]
"""Per slice: (index in the block table, checksum over the stage's layers) of each block that the slice completes."""


@dataclass(slots=True, eq=False)
class StageExecutor:
    """The stage of this process."""

    engine: "EngineThread"
    memory: KvMemory
    submit: Submit
    inbox: HiddenInbox | None = None  # None for the first stage
    outbox: HiddenOutbox | None = None  # None for the last stage

    def begin(
        self,
        plans: Sequence[SlicePlan],
        on_prefix: Callable[[int], None] | None = None,
        *,
        step: int = 0,
    ) -> "StageStep":
        """Returns a new step. Steps are computed in the order of `StageStep.compute` calls; `step` is a group's step
        number. `on_prefix(layer)` waits, in the engine's thread, for the layer's prefix and may raise PrefixTimeout."""
        return StageStep(self, step, plans, on_prefix)

    async def send_blocks(self, action: SendBlocks) -> None:
        """Sends the stage's layers of whole blocks and waits until they have arrived. Raises MoonserveError."""
        layout = self.memory.layout
        route = KvRoute(self.memory, action.landing, block_runs(action.pairs, layout))
        await self.submit(route.transfer(range(layout.pieces_per_block)))


class StageStep:
    """One step at this stage."""

    def __init__(
        self,
        stage: StageExecutor,
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
        """Computes the step and returns the sampled tokens. Waits for the hidden states of the stage before, if any,
        and publishes its own. Raises what engine and transfer engine raise; the stages behind then fail, too."""
        stage = self._stage
        if stage.inbox is None and stage.outbox is None:
            return await stage.engine.execute(self._slices, self._writer.on_layer, before_attention=self._on_prefix)
        try:
            return await stage.engine.execute(
                self._slices, self._writer.on_layer, hidden=self._hidden(stage.inbox, stage.outbox)
            )
        except Exception:  # the next stage must not wait for what will not come
            if stage.outbox is not None:
                stage.outbox.publish_failure(self._step)
            raise

    def _hidden(self, inbox: HiddenInbox | None, outbox: HiddenOutbox | None) -> HiddenStates:
        step, num_tokens = self._step, self._num_tokens
        return HiddenStates(
            fetch=None if inbox is None else partial(inbox.fetch, step, num_tokens),
            passed_on=None if outbox is None else outbox.rows(step),
            on_passed=None if outbox is None else partial(outbox.publish, step, num_tokens),
        )

    def checksums(self) -> Checksums:
        """Returns the completed blocks' checksums. Call after `compute`."""
        return self._writer.checksums()

    def send_to(self, landing: Landing, send_from: int) -> None:
        """Sends the only slice to this landing; see `StepWriter.send_to`. Call before `finish`."""
        self._writer.send_to(landing, send_from)

    def is_sent(self, position: int) -> bool:
        """Returns True if the slice at `position` has a landing."""
        return self._writer.is_sent(position)

    def finish(self) -> None:
        """Sends the remaining bytes. Call after `compute`."""
        self._writer.finish()

    async def wait_until_sent(self, position: int) -> None:
        """Waits until no write of the slice at `position` is in flight. Raises the first error."""
        await self._writer.wait_until_sent(position)


def plan_to_wire(plan: SlicePlan) -> pipeline_pb2.StageSlice:
    piece = plan.slice
    num_known = piece.end if piece.scores is None else piece.end + 1
    return to_message(
        pipeline_pb2.StageSlice,
        piece,
        token_ids=pack_tokens(piece.token_ids[:num_known]),
        sampling=sampling_to_wire(piece.sampling),
        landing=None if plan.landing is None else _landing_to_wire(plan.landing),
        send_from=plan.send_from,
        complete=plan.complete,
        num_scored_top=None if piece.scores is None else piece.scores.num_top,
    )


def plan_from_wire(message: pipeline_pb2.StageSlice) -> SlicePlan:
    return SlicePlan(
        slice=from_message(
            Slice,
            message,
            token_ids=unpack_tokens(message.token_ids),
            block_table=tuple(message.block_table),
            sampling=sampling_from_wire(message.sampling),
            scores=PromptScores(message.num_scored_top) if message.HasField("num_scored_top") else None,
        ),
        landing=_landing_from_wire(message.landing) if message.HasField("landing") else None,
        send_from=message.send_from,
        complete=tuple(message.complete),
    )


def done_to_wire(
    plans: Sequence[SlicePlan],
    sampled: Sequence[Sampled | None],
    checksums: Checksums,
    *,
    is_last: bool,
) -> pipeline_pb2.StageStepReply:
    """Returns a stage's answer to a step. `is_last`: the stage has the model's last layer."""
    reply = pipeline_pb2.StageStepReply()
    for plan, result, sums in zip(plans, sampled, checksums, strict=True):
        done = reply.slices.add(checksums=[checksum for _, checksum in sums])
        if is_last and plan.slice.scores is not None:
            done.prompt_logprobs.CopyFrom(prompt_logprobs_to_wire(plan.slice.scores.result()))
        if result is not None:
            token = Token(
                request_id=result.request_id,
                index=0,
                token_id=result.token_id,
                logprobs=result.logprobs,
            )
            done.sampled.CopyFrom(token_to_wire(token))
            done.failure = result.failure or ""
    return reply


def sampled_from_wire(message: pipeline_pb2.StageSliceDone, plan: SlicePlan) -> Sampled | None:
    """Returns the sampled token of a slice, and adds the prompt's log-probabilities to the slice's scores."""
    piece = plan.slice
    if piece.scores is not None and message.HasField("prompt_logprobs"):
        piece.scores.put(piece.start, prompt_logprobs_from_wire(message.prompt_logprobs))
    if not message.HasField("sampled"):
        return None
    with_logprobs = plan.slice.sampling.num_logprobs is not None
    token = token_from_wire(message.sampled, with_logprobs=with_logprobs)
    return Sampled(
        request_id=token.request_id,
        token_id=token.token_id,
        logprobs=token.logprobs,
        failure=message.failure or None,
    )


def send_to_wire(action: SendBlocks) -> pipeline_pb2.StageSendRequest:
    return pipeline_pb2.StageSendRequest(
        landing=_landing_to_wire(action.landing),
        own_blocks=[own for own, _ in action.pairs],
        target_blocks=[target for _, target in action.pairs],
    )


def send_from_wire(message: pipeline_pb2.StageSendRequest) -> SendBlocks:
    return SendBlocks(
        request_id=RequestId(""),
        landing=_landing_from_wire(message.landing),
        pairs=tuple(zip(message.own_blocks, message.target_blocks, strict=True)),
    )


def _landing_to_wire(landing: Landing) -> pipeline_pb2.StageLanding:
    return to_message(pipeline_pb2.StageLanding, landing)


def _landing_from_wire(message: pipeline_pb2.StageLanding) -> Landing:
    """Returns a landing with the fields that writing needs. The lease stays with the leader."""
    blocks = tuple(message.block_ids)
    elsewhere = {"lease_id": LeaseId(""), "num_cached_blocks": 0, "ttl_s": 0.0}
    return from_message(Landing, message, block_ids=blocks, **elsewhere)
