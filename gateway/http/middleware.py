"""ASGI middleware for every request before it reaches a route.

Assigns each request an id and echoes it, checks the API key except on open paths, opens and settles its admission
(`gateway.access.rate_limit_service`), and turns uncaught exceptions into OpenAI errors.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moonserve.gateway.access.api_key import KeyLimits
from moonserve.gateway.access.key_table import KeyTable
from moonserve.gateway.access.rate_limit_service import Admission, RateLimiter
from moonserve.gateway.access.tenant_isolation import Identity
from moonserve.gateway.errors import ApiError, reply_for
from moonserve.gateway.http.connection import KEY, Connection
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.request import new_id

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

_OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/metrics", "/metrics/cluster", "/version", "/dashboard", "/openapi.json"}
)
# The id becomes part of other ids, headers and log lines.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True, eq=False)
class GatewayMiddleware:
    """ASGI middleware around the application."""

    app: ASGIApp
    direct: Mapping[tuple[str, str], Handler]  # handlers by method and path; other requests go to `app`
    keys: KeyTable
    limiter: RateLimiter
    limits: KeyLimits  # of keys without their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _REQUEST_ID.fullmatch(given) else new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        # Clients repeat their ids, on retries and by mistake; in the cluster each id is one request.
        is_given = request_id.encode() == given
        unique = f"{request_id}-{secrets.token_hex(4)}" if is_given else request_id
        scope["state"]["cluster_id"] = unique
        scope[KEY] = Connection(send)
        try:
            await self._answer(scope, receive, _HeaderSender(send, request_id.encode()), headers)
        finally:
            del scope[KEY]  # breaks a reference cycle: uvicorn's request cycle holds the scope, which holds the cycle

    async def _answer(self, scope: Scope, receive: Receive, sender: _HeaderSender, headers: dict[bytes, bytes]) -> None:
        admission: Admission | None = None
        try:
            by_key = b"bearer " + headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
            identity = self._identify(scope["path"], headers.get(b"authorization", by_key))
            admission = Admission(identity, scope["state"]["cluster_id"], self.limiter)
            scope["state"]["admission"] = admission
            sender.headers = admission.headers
            if scope["method"] == "POST":
                admission.check()
            handler = self.direct.get((scope["method"], scope["path"]))
            app = self.app if handler is None else await handler(Request(scope, receive))
            await app(scope, receive, sender.send)
        except Exception as error:  # the outermost frame: without it the client would get no reply
            if sender.started or not isinstance(error, (ApiError, MoonserveError)):
                whose = request_extra(scope["state"]["cluster_id"])
                log.exception("%s %s failed", scope["method"], scope["path"], extra=whose)
            await sender.fail(scope, receive, error)
        finally:
            if admission is not None:
                admission.settle()

    def _identify(self, path: str, authorization: bytes) -> Identity:
        """Returns the identity of the request's key. Raises ApiError (401), or NoWorker while the keys are unknown."""
        if path in _OPEN_PATHS or path.startswith("/assets/"):
            return Identity()
        if self.keys.is_open:
            return Identity(limits=self.limits)
        scheme, _, presented = authorization.partition(b" ")
        key = self.keys.find(presented.strip())
        if scheme.lower() != b"bearer" or key is None:
            raise ApiError(
                401,
                "the API key is missing or wrong",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return Identity(
            key_id=key.key_id,
            tenant=key.tenant if self.keys.names_tenants else None,
            priority=key.priority,
            limits=key.limits.or_else(self.limits),
        )


class _HeaderSender:
    """Adds the request id and further headers to the reply."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False
        self.headers: Mapping[str, str] = {}  # of the reply; read when it starts

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self._request_id),
                *((name.encode(), value.encode()) for name, value in self.headers.items()),
            ]
        await self._send(message)

    async def fail(self, scope: Scope, receive: Receive, error: Exception) -> None:
        """Sends an error reply unless a reply has begun."""
        if not self.started:
            await reply_for(error).response()(scope, receive, self.send)
