"""Failures as HTTP replies: the one place where an error becomes a status code and an OpenAI error body.

Whatever is not in the table is our own bug: 500 without details of the inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    MoonserveError,
    NoWorker,
    Overloaded,
    PeerError,
    StaleLease,
)


class ApiError(Exception):
    """A refusal that is HTTP's own business, before the cluster is asked."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as it leaves the gateway."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """`{"error": {…}}` as JSON."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return json.dumps({"error": error}).encode()


# Order matters: the first class that fits. (class, status, type, code)
_TABLE: tuple[tuple[type[MoonserveError], int, str, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (NoWorker, 503, "service_unavailable_error", "no_worker"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Cancelled, 499, "cancelled_error", "cancelled"),
    (PeerError, 503, "service_unavailable_error", "worker_lost"),
    (StaleLease, 503, "service_unavailable_error", "worker_lost"),
)


def reply_for(error: BaseException) -> ErrorReply:
    """The reply for any exception."""
    if isinstance(error, ApiError):
        return ErrorReply(
            status=error.status,
            message=error.message,
            kind=error.kind,
            param=error.param,
            code=error.code,
            headers=error.headers,
        )
    for cls, status, kind, code in _TABLE:
        if isinstance(error, cls):
            return _reply(error, status, kind, code)
    return ErrorReply(
        status=500, message="internal error", kind="internal_error", code="internal_error"
    )


def _reply(error: MoonserveError, status: int, kind: str, code: str) -> ErrorReply:
    param = error.param if isinstance(error, InvalidRequest) else None
    return ErrorReply(
        status=status,
        message=error.message,
        kind=kind,
        param=param,
        code=code,
        extra=_predictions(error),
        headers=_retry_after(error, status),
    )


def _predictions(error: MoonserveError) -> dict[str, float]:
    if not isinstance(error, Overloaded):
        return {}
    named = {
        "predicted_ttft_s": error.predicted_ttft_s,
        "predicted_tbt_s": error.predicted_tbt_s,
    }
    return {name: value for name, value in named.items() if value is not None}


def _retry_after(error: MoonserveError, status: int) -> dict[str, str]:
    """Retry-After is whole seconds (RFC 9110, 10.2.3), so never 0 when we want a pause."""
    if status not in (429, 503):
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
