"""The application: routes, their place in the OpenAPI document, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.api import Api
from gateway.errors import ApiError, reply_for
from gateway.front import FrontDoor
from gateway.keys.holder import KeyHolder
from gateway.keys.record import KeyLimits
from gateway.limits.limiter import Limiter
from gateway.operations import Operations, package_version
from gateway.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from protocol.errors import MoonserveError

Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    api: Api,
    operations: Operations,
    keys: KeyHolder,
    limiter: Limiter,
    limits: KeyLimits,
) -> ASGIApp:
    """The whole HTTP interface. `limits`: of keys that have none of their own."""
    app = FastAPI(
        title="moonserve",
        version=package_version(),
        redirect_slashes=False,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        exception_handlers={
            ApiError: _on_error,
            MoonserveError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_error,  # re-raised after the reply, so that the front door logs it
        },
    )
    _add_posts(app, api)
    _add_gets(app, api, operations)
    return FrontDoor(app, keys, limiter, limits)


def _add_posts(app: FastAPI, api: Api) -> None:
    routes: list[tuple[str, Handler, type | None]] = [
        ("/v1/chat/completions", api.chat, ChatBody),
        ("/v1/completions", api.completions, CompletionBody),
        ("/v1/embeddings", api.embeddings, None),
        ("/tokenize", api.tokenize, TokenizeBody),
        ("/detokenize", api.detokenize, DetokenizeBody),
    ]
    for path, handler, body in routes:
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            openapi_extra=_document(body) if body else None,
        )


def _add_gets(app: FastAPI, api: Api, operations: Operations) -> None:
    routes: list[tuple[str, Handler]] = [
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
        ("/v1/cluster", operations.cluster),
        ("/v1/requests/{request_id:path}/explain", operations.explain),
        ("/v1/explain/{request_id:path}", operations.explain),
        ("/health", operations.health),
        ("/ready", operations.ready),
        ("/metrics", operations.metrics),
        ("/version", operations.version),
        ("/dashboard", operations.dashboard),
    ]
    for path, handler in routes:
        app.add_api_route(path, handler, methods=["GET"], response_model=None)


def _document(body: Any) -> dict[str, Any]:
    """A route's body in the OpenAPI document; FastAPI itself never sees it (we read it bounded)."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its references replaced; our models do not refer to themselves."""
    if isinstance(schema, list):
        return [_inline(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inline(part, definitions) for name, part in schema.items()}


async def _on_error(request: Request, error: Exception) -> Response:
    reply = reply_for(error)
    return Response(
        reply.body(), reply.status, headers=dict(reply.headers), media_type="application/json"
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own: no such path, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    messages = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not possible at {request.url.path}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    refusal = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code),
        headers=error.headers,
    )
    return await _on_error(request, refusal)
