"""Between the frozen domain types and the generated protobuf messages; nothing else converts."""

from __future__ import annotations

import numpy as np

from protocol.ids import GatewayId, RequestId, Role
from protocol.keys import pack_keys, pack_tokens, unpack_keys, unpack_tokens
from protocol.layout import KvLayout
from protocol.pb import common_pb2, conductor_pb2, worker_pb2
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.prompt_logprobs import FLOAT, UINT, PromptLogprobs
from protocol.request import (
    DecodeReport,
    Endpoint,
    FinishReason,
    Logprobs,
    Placement,
    PrefillReport,
    PrefixSource,
    Request,
    SamplingParams,
    Token,
)

_ROLES = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.STORE: common_pb2.ROLE_STORE,
}
_ROLES_BACK = {value: role for role, value in _ROLES.items()}

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}


def role_to_wire(role: Role) -> common_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_wire(message: common_pb2.Role.ValueType) -> Role:
    """Raises KeyError for an unspecified role."""
    return _ROLES_BACK[message]


def layout_to_wire(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        num_layers=layout.num_layers,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
    )


def layout_from_wire(message: common_pb2.KvLayout) -> KvLayout:
    return KvLayout(
        num_layers=message.num_layers,
        block_size=message.block_size,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=message.dtype,
    )


def endpoint_to_wire(endpoint: Endpoint) -> common_pb2.Endpoint:
    return common_pb2.Endpoint(
        instance_id=endpoint.instance_id,
        epoch=endpoint.epoch,
        rpc_address=endpoint.rpc_address,
        transfer_address=endpoint.transfer_address,
        host=endpoint.host,
    )


def endpoint_from_wire(message: common_pb2.Endpoint) -> Endpoint:
    return Endpoint(
        instance_id=message.instance_id,
        epoch=message.epoch,
        rpc_address=message.rpc_address,
        transfer_address=message.transfer_address,
        host=message.host,
    )


def placement_to_wire(placement: Placement) -> common_pb2.Placement:
    return common_pb2.Placement(
        request_id=placement.request_id,
        prefill=endpoint_to_wire(placement.prefill),
        decode=endpoint_to_wire(placement.decode),
        prefix_sources=[
            common_pb2.PrefixSource(
                store=endpoint_to_wire(source.store),
                first_block=source.first_block,
                num_blocks=source.num_blocks,
            )
            for source in placement.prefix_sources
        ],
        predicted_ttft_s=placement.predicted_ttft_s,
        predicted_tbt_s=placement.predicted_tbt_s,
        rank=placement.rank,
    )


def placement_from_wire(message: common_pb2.Placement) -> Placement:
    return Placement(
        request_id=RequestId(message.request_id),
        prefill=endpoint_from_wire(message.prefill),
        decode=endpoint_from_wire(message.decode),
        prefix_sources=tuple(
            PrefixSource(
                store=endpoint_from_wire(source.store),
                first_block=source.first_block,
                num_blocks=source.num_blocks,
            )
            for source in message.prefix_sources
        ),
        predicted_ttft_s=message.predicted_ttft_s,
        predicted_tbt_s=message.predicted_tbt_s,
        rank=message.rank,
    )


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=sorted(sampling.stop_token_ids),
        num_logprobs=sampling.num_logprobs,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        grammar=sampling.grammar,
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        num_prompt_logprobs=sampling.num_prompt_logprobs,
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        grammar=message.grammar,
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        num_prompt_logprobs=message.num_prompt_logprobs
        if message.HasField("num_prompt_logprobs")
        else None,
    )


def submission_to_wire(request: Request, placement: Placement) -> worker_pb2.SubmitRequest:
    return worker_pb2.SubmitRequest(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        token_ids=pack_tokens(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        block_keys=pack_keys(request.block_keys),
        sampling=sampling_to_wire(request.sampling),
        placement=placement_to_wire(placement),
        priority=request.priority,
        timeout_s=request.timeout_s,
        tenant=request.tenant,
        traceparent=request.traceparent,
    )


def request_from_wire(message: worker_pb2.SubmitRequest | worker_pb2.CommitRequest) -> Request:
    """The request in a submission or in a handoff (where token_ids ends with the token that prefill sampled)."""
    return Request(
        request_id=RequestId(message.request_id),
        gateway_id=GatewayId(message.gateway_id),
        token_ids=tuple(unpack_tokens(message.token_ids)),
        num_prompt_tokens=message.num_prompt_tokens,
        block_keys=tuple(unpack_keys(message.block_keys)),
        sampling=sampling_from_wire(message.sampling),
        priority=message.priority,
        timeout_s=message.timeout_s,
        tenant=message.tenant,
        traceparent=message.traceparent,
    )


def token_to_wire(token: Token) -> worker_pb2.TokenEvent:
    event = worker_pb2.TokenEvent(
        request_id=token.request_id, index=token.index, token_id=token.token_id
    )
    if token.logprobs is not None:
        event.logprob = token.logprobs.sampled
        for token_id, logprob in token.logprobs.top:
            event.top_logprobs.add(token_id=token_id, logprob=logprob)
    if token.finish_reason is not None:
        event.finish_reason = _FINISH[token.finish_reason]
    return event


def token_from_wire(message: worker_pb2.TokenEvent, *, with_logprobs: bool) -> Token:
    """`with_logprobs`: whether the request asked for them, which the event itself does not tell."""
    return Token(
        request_id=RequestId(message.request_id),
        index=message.index,
        token_id=message.token_id,
        logprobs=_logprobs_from_wire(message) if with_logprobs else None,
        finish_reason=_FINISH_BACK.get(message.finish_reason),
    )


def _logprobs_from_wire(message: worker_pb2.TokenEvent) -> Logprobs:
    return Logprobs(
        sampled=message.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs),
    )


def prefill_report_to_wire(report: PrefillReport) -> worker_pb2.PrefillReport:
    return worker_pb2.PrefillReport(
        request_id=report.request_id,
        cached_tokens=report.cached_tokens,
        queue_s=report.queue_s,
        load_s=report.load_s,
        compute_s=report.compute_s,
        prompt_logprobs=None
        if report.prompt_logprobs is None
        else prompt_logprobs_to_wire(report.prompt_logprobs),
    )


def prefill_report_from_wire(message: worker_pb2.PrefillReport) -> PrefillReport:
    return PrefillReport(
        request_id=RequestId(message.request_id),
        cached_tokens=message.cached_tokens,
        queue_s=message.queue_s,
        load_s=message.load_s,
        compute_s=message.compute_s,
        prompt_logprobs=prompt_logprobs_from_wire(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
    )


def prompt_logprobs_to_wire(found: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        logprobs=found.logprobs.tobytes(),
        ranks=found.ranks.tobytes(),
        num_top=found.top_ids.shape[1],
        top_ids=found.top_ids.tobytes(),
        top_logprobs=found.top_logprobs.tobytes(),
    )


def prompt_logprobs_from_wire(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    """Raises ValueError for arrays of other sizes than they say."""
    logprobs = np.frombuffer(message.logprobs, FLOAT)
    shape = (len(logprobs), message.num_top)
    return PromptLogprobs(
        logprobs=logprobs,
        ranks=np.frombuffer(message.ranks, UINT).reshape(shape[:1]),
        top_ids=np.frombuffer(message.top_ids, UINT).reshape(shape),
        top_logprobs=np.frombuffer(message.top_logprobs, FLOAT).reshape(shape),
    )


def decode_report_to_wire(report: DecodeReport) -> worker_pb2.DecodeReport:
    return worker_pb2.DecodeReport(
        request_id=report.request_id,
        transfer_s=report.transfer_s,
        queue_s=report.queue_s,
    )


def decode_report_from_wire(message: worker_pb2.DecodeReport) -> DecodeReport:
    return DecodeReport(
        request_id=RequestId(message.request_id),
        transfer_s=message.transfer_s,
        queue_s=message.queue_s,
    )


def prefill_profile_from_wire(message: conductor_pb2.PrefillProfile) -> PrefillProfile:
    return PrefillProfile(c0=message.c0, c1=message.c1, c2=message.c2)


def decode_profile_from_wire(message: conductor_pb2.DecodeProfile) -> DecodeProfile:
    return DecodeProfile(c0=message.c0, c1=message.c1, c2=message.c2)
