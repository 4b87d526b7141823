"""Errors as HTTP replies: the only place that maps an exception to a status code and an OpenAI error body.

An exception that is not in the table is a bug: 500 without internal details.
"""

import json
import math
from collections.abc import Mapping

from starlette.responses import Response

from moonserve.protocol.errors import (
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
    """An error reply of the gateway."""

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
        """`extra`: further fields of the body; fields that are None are left out."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._extra = {name: value for name, value in (extra or {}).items() if value is not None}

    def body(self) -> bytes:
        """Returns `{"error": {…}}` as JSON."""
        named = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": {**named, **self._extra}}).encode()

    def response(self) -> Response:
        """Returns the HTTP response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None) -> ApiError:
    """Returns the error 400 for an invalid parameter."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(message: str, param: str) -> ApiError:
    """Returns the error 400 for a parameter that this server does not support."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


# Rows are (class, status, type, code). The first matching class counts.
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
    """Returns the reply to the client for any exception."""
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
    """Returns the header Retry-After in whole seconds (RFC 9110, 10.2.3), at least 1 so that the client pauses."""
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}
