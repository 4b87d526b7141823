"""The front door: what holds for every request before a route sees it.

Gives each request its id and echoes it, checks the API key on the paths that cost something, and turns what nobody
caught into an OpenAI error. Plain ASGI.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.connection import Connection
from gateway.errors import ApiError, reply_for
from protocol.ids import new_id

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset(
    {"/health", "/ready", "/metrics", "/version", "/dashboard", "/openapi.json"}
)
# It becomes a part of ids, headers and log lines.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class FrontDoor:
    """ASGI middleware around the application."""

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], tenant_keys: Mapping[str, str] | None = None
    ) -> None:
        """`tenant_keys`: keys by tenant, beside those of nobody in particular."""
        self._app = app
        named = tenant_keys or {}
        self._keys = [(key.encode(), tenant) for tenant, key in named.items()]
        self._keys += [(key.encode(), "") for key in api_keys]
        self._names_tenants = bool(named)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["cluster_id"] = _cluster_id(
            request_id, is_given=request_id.encode() == given
        )
        Connection(send).attach(scope)
        await self._answer(scope, receive, _Echo(send, request_id.encode()), headers)

    async def _answer(
        self, scope: Scope, receive: Receive, echo: _Echo, headers: dict[bytes, bytes]
    ) -> None:
        try:
            tenant = self._authenticate(scope["path"], headers.get(b"authorization", b""))
            scope["state"]["tenant"] = tenant
            await self._app(scope, receive, echo.send)
        except ApiError as error:
            await echo.fail(error)
        except Exception as error:  # the outermost frame: without it the client would get no reply
            log.exception("%s %s failed", scope["method"], scope["path"])
            await echo.fail(error)

    def _authenticate(self, path: str, authorization: bytes) -> str | None:
        """The tenant whose key it is, "" for a key of nobody in particular; None: keys do not say who asks."""
        if not self._keys or path in _OPEN_PATHS:
            return None
        scheme, _, presented = authorization.partition(b" ")
        key = presented.strip()
        matches = [name for known, name in self._keys if hmac.compare_digest(key, known)]
        if scheme.lower() != b"bearer" or not matches:
            raise ApiError(
                401,
                "missing or wrong API key",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return matches[0] if self._names_tenants else None


def _cluster_id(request_id: str, *, is_given: bool) -> str:
    """Clients repeat their ids, on retries and by mistake; within the cluster an id is one request."""
    return f"{request_id}-{secrets.token_hex(4)}" if is_given else request_id


class _Echo:
    """Adds the request id to the reply's headers."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self._request_id),
            ]
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """An error reply, unless another reply has begun."""
        if self._started:
            return
        reply = reply_for(error)
        body = reply.body()
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
        await self.send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
