"""Reading a request's body: bounded in bytes and in time, and only when the headers let it."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from gateway.errors import ApiError
from protocol.errors import Cancelled


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError: 413 as soon as it is known to be too long, 408 when it does not come."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(
            408, "the body did not arrive in time", kind="timeout_error", code="request_timeout"
        ) from error
    except ClientDisconnect as error:
        raise Cancelled("the client went away") from error


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
