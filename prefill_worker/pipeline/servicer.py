"""A follower as its leader calls it. Computes what it is told, in the order in which it is told; decides nothing."""

from __future__ import annotations

from typing import Any

import grpc.aio

from prefill_worker.pipeline.hidden import HiddenInbox
from prefill_worker.pipeline.stage import STEP_TIMEOUT_S, OwnStage, OwnStep
from prefill_worker.pipeline.wire import (
    done_to_wire,
    plan_from_wire,
    send_from_wire,
    source_from_wire,
    source_to_wire,
)
from protocol.errors import InvalidRequest, MoonserveError
from protocol.failures import failure_to_wire
from protocol.pb import pipeline_pb2, pipeline_pb2_grpc
from transfer import TransferEngine
from transfer.patience import Patience

Context = grpc.aio.ServicerContext[Any, Any]


class StageServicer(pipeline_pb2_grpc.PipelineStageServicer):
    """Serves `PipelineStage` for one leader. `facts`: what it says of itself, but for where hidden states go."""

    def __init__(
        self,
        stage: OwnStage,
        transfer: TransferEngine,
        *,
        facts: pipeline_pb2.StageJoinReply,
        row_bytes: int,
        patience: Patience,
    ) -> None:
        """`row_bytes`: of one token's hidden states."""
        self._stage = stage
        self._transfer = transfer
        self._facts = facts
        self._row_bytes = row_bytes
        self._patience = patience
        self._last_step = 0
        self._unfinished: dict[int, OwnStep] = {}

    async def Join(
        self, request: pipeline_pb2.StageJoinRequest, context: Context
    ) -> pipeline_pb2.StageJoinReply:
        self._stage.inbox = HiddenInbox(
            self._transfer,
            source_from_wire(request.previous),
            row_bytes=self._row_bytes,
            patience=self._patience,
            longest_wait_s=STEP_TIMEOUT_S,
        )
        reply = pipeline_pb2.StageJoinReply()
        reply.CopyFrom(self._facts)
        if self._stage.outbox is not None:
            reply.hidden.CopyFrom(source_to_wire(self._stage.outbox.source))
        return reply

    async def RunStep(
        self, request: pipeline_pb2.StageStepRequest, context: Context
    ) -> pipeline_pb2.StageStepReply:
        """Raises InvalidRequest for a step that comes after a later one, whose KV may depend on it."""
        if request.step <= self._last_step:
            raise InvalidRequest(f"step {request.step} came after step {self._last_step}")
        self._last_step = request.step
        plans = [plan_from_wire(message) for message in request.slices]
        step = self._stage.begin(plans, step=request.step)
        if any(plan.landing is not None for plan in plans):
            self._unfinished[request.step] = step
        sampled = await step.compute()
        is_last = self._stage.outbox is None
        reply = done_to_wire(plans, sampled, step.checksums(), is_last=is_last)
        step.finish()
        return reply

    async def FinishStep(
        self, request: pipeline_pb2.StageFinishRequest, context: Context
    ) -> pipeline_pb2.StageFinishReply:
        reply = pipeline_pb2.StageFinishReply()
        step = self._unfinished.pop(request.step, None)
        if step is None:  # it sent nothing, or never came here
            return reply
        for position in range(step.num_slices):
            try:
                await step.sent(position)
            except MoonserveError as error:
                reply.failures[position].CopyFrom(failure_to_wire(error))
        return reply

    async def SendBlocks(
        self, request: pipeline_pb2.StageSendRequest, context: Context
    ) -> pipeline_pb2.StageSendReply:
        await self._stage.send_blocks(send_from_wire(request))
        return pipeline_pb2.StageSendReply()
