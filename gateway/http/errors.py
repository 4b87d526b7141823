"""Failures as HTTP replies: the one place where an error becomes a status code and an OpenAI error body.

Whatever is not in the table is our own bug: 500 without details of the inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from starlette.responses import Response

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
    """An error as it leaves the gateway."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, float | None] | None = None,
    ) -> None:
        """`extra`: further fields of the body; None = it has none of that name."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._extra = {name: value for name, value in (extra or {}).items() if value is not None}

    def body(self) -> bytes:
        """`{"error": {…}}` as JSON."""
        named = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": {**named, **self._extra}}).encode()

    def response(self) -> Response:
        """The reply."""
        return Response(self.body(), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None) -> ApiError:
    """400 for a parameter that cannot be."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(message: str, param: str) -> ApiError:
    """400 for a parameter that asks for what this server does not do."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


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
_PREDICTED = ("predicted_ttft_s", "predicted_tbt_s")


def reply_for(error: BaseException) -> ApiError:
    """What the client is told of any exception."""
    if isinstance(error, ApiError):
        return error
    for cls, status, kind, code in _TABLE:
        if isinstance(error, cls):
            return ApiError(
                status,
                error.message,
                kind=kind,
                param=error.param if isinstance(error, InvalidRequest) else None,
                code=code,
                extra={n: getattr(error, n) for n in _PREDICTED if isinstance(error, Overloaded)},
                headers=_retry_after(error) if status in (429, 503) else None,
            )
    return ApiError(500, "internal error", kind="internal_error", code="internal_error")


def _retry_after(error: MoonserveError) -> dict[str, str]:
    """Retry-After is whole seconds (RFC 9110, 10.2.3), so never 0 when we want a pause."""
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
