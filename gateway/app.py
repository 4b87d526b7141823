"""The application: routes, their place in the OpenAPI document, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import openapi as docs
from gateway.api import Api
from gateway.errors import ApiError, reply_for
from gateway.front import FrontDoor
from gateway.keys.holder import KeyHolder
from gateway.keys.record import KeyLimits
from gateway.limits.limiter import Limiter
from gateway.model_endpoints import ModelEndpoints
from gateway.operations import Operations
from gateway.responses.handlers import Responses
from protocol.errors import MoonserveError
from protocol.scraping import package_version

Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    api: Api,
    model: ModelEndpoints,
    responses: Responses,
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
    _add_posts(app, api, model, responses)
    _add_gets(app, model, responses, operations)
    return FrontDoor(app, keys, limiter, limits)


def _add_posts(app: FastAPI, api: Api, model: ModelEndpoints, responses: Responses) -> None:
    routes: list[tuple[str, Handler, dict[str, Any]]] = [
        ("/v1/chat/completions", api.chat, docs.CHAT),
        ("/v1/completions", api.completions, docs.COMPLETIONS),
        ("/v1/responses", responses.create, docs.RESPONSES),
        ("/v1/embeddings", model.embeddings, docs.EMBEDDINGS),
        ("/tokenize", model.tokenize, docs.TOKENIZE),
        ("/detokenize", model.detokenize, docs.DETOKENIZE),
    ]
    for path, handler, operation in routes:
        _add(app, "POST", path, handler, operation)


def _add_gets(
    app: FastAPI, model: ModelEndpoints, responses: Responses, operations: Operations
) -> None:
    routes: list[tuple[str, Handler, dict[str, Any]]] = [
        ("/v1/models", model.models, docs.MODELS),
        ("/v1/models/{name:path}", model.model, docs.MODEL),
        ("/v1/responses/{response_id:path}", responses.retrieve, docs.RESPONSE),
        ("/v1/cluster", operations.cluster, docs.CLUSTER),
        ("/v1/figures", operations.figures, docs.FIGURES),
        ("/v1/requests/{request_id:path}/explain", operations.explain, docs.EXPLAIN),
        ("/v1/explain/{request_id:path}", operations.explain, docs.EXPLAIN),
        ("/health", operations.health, docs.HEALTH),
        ("/ready", operations.ready, docs.READY),
        ("/metrics", operations.metrics, docs.METRICS),
        ("/metrics/cluster", operations.cluster_metrics, docs.METRICS),
        ("/version", operations.version, docs.VERSION),
        ("/dashboard", operations.dashboard, docs.DASHBOARD),
    ]
    for path, handler, operation in routes:
        _add(app, "GET", path, handler, operation)
    _add(app, "DELETE", "/v1/responses/{response_id:path}", responses.delete, docs.DELETE_RESPONSE)


def _add(app: FastAPI, method: str, path: str, handler: Handler, operation: dict[str, Any]) -> None:
    app.add_api_route(
        path,
        handler,
        methods=[method],
        response_model=None,
        operation_id=f"{method.lower()} {path}",
        openapi_extra=operation,
    )


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
