"""Between the frozen domain types and the generated protobuf messages: `to_message` and `from_message` copy fields of
equal names, and each pair of functions says what goes another way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from protocol.ids import RequestId, Role
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

M = TypeVar("M", bound=Message)
T = TypeVar("T")

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


def to_message(message_type: type[M], value: Any, **others: Any) -> M:
    """A message with what the dataclass `value` has in fields of the same names, None unset, and with `others`."""
    for name, _ in _shared_fields(message_type, type(value)):  # type: ignore[arg-type]
        if name not in others:
            others[name] = getattr(value, name)
    return message_type(**others)


def from_message(value_type: Callable[..., T], message: Message, **others: Any) -> T:
    """A dataclass with what `message` has in fields of the same names, None where one is unset, and with `others`."""
    for name, is_optional in _shared_fields(type(message), value_type):  # type: ignore[arg-type]
        if name not in others:
            is_unset = is_optional and not message.HasField(name)
            others[name] = None if is_unset else getattr(message, name)
    return value_type(**others)


@functools.cache
def _shared_fields(message_type: Any, value_type: Any) -> tuple[tuple[str, bool], ...]:
    """Names, and whether the message's field can be unset."""
    names = {field.name for field in dataclasses.fields(value_type)}
    fields = message_type.DESCRIPTOR.fields
    return tuple((each.name, each.has_presence) for each in fields if each.name in names)


def role_to_wire(role: Role) -> common_pb2.Role.ValueType:
    return _ROLES[role]


def role_from_wire(message: common_pb2.Role.ValueType) -> Role:
    """Raises KeyError for an unspecified role."""
    return _ROLES_BACK[message]


def layout_to_wire(layout: KvLayout) -> common_pb2.KvLayout:
    return to_message(common_pb2.KvLayout, layout)


def layout_from_wire(message: common_pb2.KvLayout) -> KvLayout:
    return from_message(KvLayout, message)


def endpoint_to_wire(endpoint: Endpoint) -> common_pb2.Endpoint:
    return to_message(common_pb2.Endpoint, endpoint)


def endpoint_from_wire(message: common_pb2.Endpoint) -> Endpoint:
    return from_message(Endpoint, message)


def placement_to_wire(placement: Placement) -> common_pb2.Placement:
    return to_message(
        common_pb2.Placement,
        placement,
        prefill=endpoint_to_wire(placement.prefill),
        decode=endpoint_to_wire(placement.decode),
        prefix_sources=[
            to_message(common_pb2.PrefixSource, source, store=endpoint_to_wire(source.store))
            for source in placement.prefix_sources
        ],
    )


def placement_from_wire(message: common_pb2.Placement) -> Placement:
    return from_message(
        Placement,
        message,
        prefill=endpoint_from_wire(message.prefill),
        decode=endpoint_from_wire(message.decode),
        prefix_sources=tuple(
            from_message(PrefixSource, source, store=endpoint_from_wire(source.store))
            for source in message.prefix_sources
        ),
    )


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return to_message(
        common_pb2.SamplingParams,
        sampling,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias),
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return from_message(
        SamplingParams,
        message,
        stop_token_ids=frozenset(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
    )


def submission_to_wire(request: Request, placement: Placement) -> worker_pb2.SubmitRequest:
    return to_message(
        worker_pb2.SubmitRequest,
        request,
        token_ids=pack_tokens(request.token_ids),
        block_keys=pack_keys(request.block_keys),
        sampling=sampling_to_wire(request.sampling),
        placement=placement_to_wire(placement),
    )


def request_from_wire(message: worker_pb2.SubmitRequest | worker_pb2.CommitRequest) -> Request:
    """The request in a submission or in a handoff (where token_ids ends with the token that prefill sampled)."""
    return from_message(
        Request,
        message,
        token_ids=tuple(unpack_tokens(message.token_ids)),
        block_keys=tuple(unpack_keys(message.block_keys)),
        sampling=sampling_from_wire(message.sampling),
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
    found = report.prompt_logprobs
    return to_message(
        worker_pb2.PrefillReport,
        report,
        prompt_logprobs=None if found is None else prompt_logprobs_to_wire(found),
    )


def prefill_report_from_wire(message: worker_pb2.PrefillReport) -> PrefillReport:
    has_logprobs = message.HasField("prompt_logprobs")
    found = prompt_logprobs_from_wire(message.prompt_logprobs) if has_logprobs else None
    return from_message(PrefillReport, message, prompt_logprobs=found)


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
    return to_message(worker_pb2.DecodeReport, report)


def decode_report_from_wire(message: worker_pb2.DecodeReport) -> DecodeReport:
    return from_message(DecodeReport, message)


def prefill_profile_from_wire(message: conductor_pb2.PrefillProfile) -> PrefillProfile:
    return from_message(PrefillProfile, message)


def decode_profile_from_wire(message: conductor_pb2.DecodeProfile) -> DecodeProfile:
    return from_message(DecodeProfile, message)
