"""Conversion between the frozen domain types and the generated protobuf messages.

`to_message` and `from_message` copy fields of equal names. They also convert nested dataclasses, map enumeration
members by name, and pack block keys and token ids. The functions below them handle the exceptions. An error keeps its
class from handler to caller on every transport (`Failure`).
"""

import dataclasses
import functools
import logging
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from moonserve.protocol.errors import MoonserveError, PeerLost, error_classes
from moonserve.protocol.kv_blocks import BlockKey, pack_keys, pack_tokens, unpack_keys, unpack_tokens
from moonserve.protocol.pb import common_pb2, worker_pb2
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.request import (
    LOGPROB_DTYPE,
    RANK_DTYPE,
    Endpoint,
    FinishReason,
    Logprobs,
    Placement,
    PromptLogprobs,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Token,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
E = TypeVar("E", bound=Enum)
Converter = Callable[[Any], Any]


def to_message(message_type: type[M], value: Any, **others: Any) -> M:
    """Builds a message from the equally named fields of the dataclass `value` and from `others`. None stays unset."""
    kinds: Any = message_type, type(value)
    for name, convert in _outward(*kinds):
        if name not in others:
            found = getattr(value, name)
            others[name] = found if convert is None or found is None else convert(found)
    return message_type(**others)


def from_message(value_type: Callable[..., T], message: Message, **others: Any) -> T:
    """Builds a dataclass from the equally named fields of `message` and from `others`.

    An unset field gets the dataclass's default, else None if its type allows it. In a field without presence, 0 or an
    empty value counts as unset only if that default is None. Raises KeyError for an unspecified enumeration member, and
    any error of the dataclass or of unpacking keys."""
    kinds: Any = type(message), value_type
    for name, convert, default, is_never_unset in _inward(*kinds):
        if name in others:
            continue
        found = getattr(message, name)
        if default is not _NONE and not (found if is_never_unset else message.HasField(name)):
            others[name] = default
        else:
            others[name] = found if convert is None else convert(found)
    return value_type(**others)


_NONE = object()


@functools.cache
def _outward(message_type: Any, value_type: Any) -> list[tuple[str, Converter | None]]:
    fields = message_type.DESCRIPTOR.fields_by_name
    return [(name, _to_wire(kind, fields[name])) for name, kind, _ in _kinds(value_type) if name in fields]


@functools.cache
def _inward(message_type: Any, value_type: Any) -> list[tuple[str, Converter | None, Any, bool]]:
    """Returns (name, converter, value if unset, has no presence) of each field. _NONE = keep the field's value."""
    fields = message_type.DESCRIPTOR.fields_by_name
    return [
        (
            name,
            _from_wire(kind, fields[name]),
            _NONE if default is not None and not fields[name].has_presence else default,
            not fields[name].has_presence,
        )
        for name, kind, default in _kinds(value_type)
        if name in fields
    ]


def _kinds(value_type: Any) -> list[tuple[str, Any, Any]]:
    """Returns (name, type without None, default) of each field. Without a default: None if allowed, else _NONE."""
    hints, found = typing.get_type_hints(value_type), []
    for field in dataclasses.fields(value_type):
        kind, default = hints[field.name], field.default
        if type(None) in typing.get_args(kind):
            kind = next(each for each in typing.get_args(kind) if each is not type(None))
            default = None if default is dataclasses.MISSING else default
        found.append((field.name, kind, _NONE if default is dataclasses.MISSING else default))
    return found


def _to_wire(kind: Any, field: Any) -> Converter | None:
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SPECIAL:
        return _SPECIAL[kind][0]
    if dataclasses.is_dataclass(kind):
        return functools.partial(to_message, GetMessageClass(field.message_type))
    if field.enum_type is not None:
        return _numbers(kind, field.enum_type).__getitem__
    if origin is tuple and field.type == FieldDescriptor.TYPE_BYTES:
        return pack_keys if items[0] is BlockKey else pack_tokens
    if origin is tuple and dataclasses.is_dataclass(items[0]):
        each = functools.partial(to_message, GetMessageClass(field.message_type))
        return lambda values: [each(value) for value in values]
    return sorted if origin is frozenset else dict if origin is Mapping else None


def _from_wire(kind: Any, field: Any) -> Converter | None:
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SPECIAL:
        return _SPECIAL[kind][1]
    if dataclasses.is_dataclass(kind):
        value_type: Any = kind
        return functools.partial(from_message, value_type)
    if field.enum_type is not None:
        members = {number: each for each, number in _numbers(kind, field.enum_type).items()}
        return members.__getitem__
    if origin is tuple and field.type == FieldDescriptor.TYPE_BYTES:
        unpack: Converter = unpack_keys if items[0] is BlockKey else unpack_tokens
        return lambda packed: tuple(unpack(packed))
    if origin is tuple and dataclasses.is_dataclass(items[0]):
        item_type: Any = items[0]
        make = functools.partial(from_message, item_type)
        return lambda messages: tuple(make(message) for message in messages)
    return dict if origin is Mapping else origin


def _numbers(kind: type[E], on_wire: EnumDescriptor) -> dict[E, int]:
    """Maps members to wire values by name: PREFILL to ROLE_PREFILL. The prefix is that of the value …UNSPECIFIED."""
    prefix = on_wire.values[0].name.removesuffix("UNSPECIFIED")
    return {each: on_wire.values_by_name[prefix + each.name].number for each in kind}


_ROLES: dict[Role, Any] = _numbers(Role, common_pb2.Role.DESCRIPTOR)
_ROLES_BACK = {value: role for role, value in _ROLES.items()}

_FINISH: dict[FinishReason, Any] = _numbers(FinishReason, common_pb2.FinishReason.DESCRIPTOR)
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}


def role_to_wire(role: Role) -> common_pb2.Role.ValueType:
    number: common_pb2.Role.ValueType = _ROLES[role]
    return number


def role_from_wire(message: common_pb2.Role.ValueType) -> Role:
    """Converts a role from its wire value. Raises KeyError for an unspecified role."""
    return _ROLES_BACK[message]


def endpoint_to_wire(endpoint: Endpoint) -> common_pb2.Endpoint:
    return to_message(common_pb2.Endpoint, endpoint)


def endpoint_from_wire(message: common_pb2.Endpoint) -> Endpoint:
    return from_message(Endpoint, message)


def sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return to_message(
        common_pb2.SamplingParams,
        sampling,
        bad_words=[common_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return from_message(
        SamplingParams,
        message,
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
    )


def submission_to_wire(request: Request, placement: Placement) -> worker_pb2.SubmitRequest:
    placed = to_message(common_pb2.Placement, placement)
    return to_message(worker_pb2.SubmitRequest, request, placement=placed)


def request_from_wire(message: worker_pb2.SubmitRequest | worker_pb2.CommitRequest) -> Request:
    """Returns the request of a submission or handoff. A handoff's token_ids ends with the token sampled by prefill."""
    return from_message(Request, message)


def token_to_wire(token: Token) -> worker_pb2.TokenEvent:
    event = worker_pb2.TokenEvent(request_id=token.request_id, index=token.index, token_id=token.token_id)
    if token.logprobs is not None:
        event.logprob = token.logprobs.sampled
        for token_id, logprob in token.logprobs.top:
            event.top_logprobs.add(token_id=token_id, logprob=logprob)
    if token.finish_reason is not None:
        event.finish_reason = _FINISH[token.finish_reason]
    event.num_draft_tokens, event.num_accepted_tokens = token.num_draft_tokens, token.num_accepted_tokens
    return event


def token_from_wire(message: worker_pb2.TokenEvent, *, with_logprobs: bool) -> Token:
    """Returns the token of an event. `with_logprobs` must be true if the request wants them; events do not say so."""
    return Token(
        request_id=RequestId(message.request_id),
        index=message.index,
        token_id=message.token_id,
        logprobs=Logprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top_logprobs))
        if with_logprobs
        else None,
        finish_reason=_FINISH_BACK.get(message.finish_reason),
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
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
    """Returns the log-probabilities of a message. Raises ValueError if its arrays have inconsistent sizes."""
    logprobs = np.frombuffer(message.logprobs, LOGPROB_DTYPE)
    shape = (len(logprobs), message.num_top)
    return PromptLogprobs(
        logprobs=logprobs,
        ranks=np.frombuffer(message.ranks, RANK_DTYPE).reshape(shape[:1]),
        top_ids=np.frombuffer(message.top_ids, RANK_DTYPE).reshape(shape),
        top_logprobs=np.frombuffer(message.top_logprobs, LOGPROB_DTYPE).reshape(shape),
    )


_SPECIAL: dict[Any, tuple[Converter, Converter]] = {
    SamplingParams: (sampling_to_wire, sampling_from_wire),
    PromptLogprobs: (prompt_logprobs_to_wire, prompt_logprobs_from_wire),
}


# Errors


def handler_failure(error: BaseException, request: object) -> common_pb2.Failure:
    """Returns the message for an error that a handler raised. Logs an unexpected error under the request's id."""
    if not isinstance(error, MoonserveError):
        request_id = getattr(request, "request_id", "")
        extra = request_extra(request_id) if request_id else None
        log.error("the handler of a %s failed", type(request).__name__, exc_info=error, extra=extra)
    return failure_to_wire(error)


def failure_to_wire(error: BaseException) -> common_pb2.Failure:
    """Converts an error to a message. Errors outside the tree become "internal error" without details."""
    if not isinstance(error, MoonserveError):
        return common_pb2.Failure(code=MoonserveError.code, message="internal error")
    return common_pb2.Failure(
        code=error.code,
        message=error.message,
        ids=error.ids,
        retry_after_s=error.retry_after_s or 0.0,
    )


def failure_from_wire(failure: common_pb2.Failure) -> MoonserveError:
    """Rebuilds the error from its message. An unknown code gives the base class."""
    cls = error_classes().get(failure.code, MoonserveError)
    error = cls.__new__(cls)
    MoonserveError.__init__(error, failure.message)
    error.ids = dict(failure.ids)  # set here: a peer's names need not be valid arguments of __init__
    error.retry_after_s = failure.retry_after_s or None
    return error


def failure_from_bytes(serialized: bytes) -> MoonserveError:
    """Rebuilds an error from a serialized message. Malformed bytes give PeerLost, so that the call still ends."""
    try:
        failure = common_pb2.Failure.FromString(serialized)
    except DecodeError as error:
        return PeerLost(f"the peer failed, and its error message is malformed: {error}")
    return failure_from_wire(failure)
