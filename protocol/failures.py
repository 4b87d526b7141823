"""Conversion of errors to and from messages: an error keeps its class from handler to caller on every transport."""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from protocol.errors import MoonserveError, PeerLost, error_classes
from protocol.logs import of
from protocol.pb import common_pb2

log = logging.getLogger(__name__)


def handler_failure(error: BaseException, request: object) -> common_pb2.Failure:
    """Returns the message for an error that a handler raised. Logs an unexpected error under the request's id."""
    if not isinstance(error, MoonserveError):
        request_id = getattr(request, "request_id", "")
        text, whose = "the handler of a %s failed", of(request_id) if request_id else None
        log.error(text, type(request).__name__, exc_info=error, extra=whose)
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
        return PeerLost(f"the peer failed, and its reason cannot be read: {error}")
    return failure_from_wire(failure)
