"""Conversion between a pipeline group's messages and its types. Both ends run the same program, started together."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import PromptScores, Sampled, Slice
from prefill_worker.actions import SendBlocks, SlicePlan
from prefill_worker.events import Landing
from prefill_worker.pipeline.stage import Checksums
from protocol.ids import LeaseId, RequestId
from protocol.keys import pack_tokens, unpack_tokens
from protocol.pb import pipeline_pb2
from protocol.request import Token
from protocol.wire import (
    from_message,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    to_message,
    token_from_wire,
    token_to_wire,
)


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
