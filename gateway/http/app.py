"""The application: routes, what `/openapi.json` says of each, and errors in OpenAI's form.

The document has the schemas of the models that check bodies, so it cannot promise another thing than is checked.
Replies have open schemas: what is named is there, more may be. FastAPI's own documentation is not used: it never sees a
body (`gateway.http.connection` reads it, bounded).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.access.key_holder import KeyHolder
from gateway.access.key_record import KeyLimits
from gateway.access.limiter import Limiter
from gateway.http.errors import ApiError, reply_for
from gateway.http.middleware import FrontDoor
from gateway.http.operations import Operations
from gateway.openai.endpoints import Api
from gateway.openai.models import DetokenizeBody, ModelEndpoints, TokenizeBody
from gateway.openai.responses.handlers import Responses
from gateway.openai.responses.schema import SHARED, ResponsesBody
from gateway.openai.schema import ChatBody, CompletionBody
from protocol.errors import MoonserveError
from protocol.scraping import package_version

Handler = Callable[[Request], Awaitable[Response]]
Json = dict[str, Any]


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
    for method, path, handler, operation in _routes(api, model, responses, operations):
        app.add_api_route(
            path,
            handler,
            methods=[method],
            response_model=None,
            operation_id=f"{method.lower()} {path}",
            openapi_extra=operation,
        )
    return FrontDoor(app, keys, limiter, limits)


def _routes(
    api: Api, model: ModelEndpoints, responses: Responses, operations: Operations
) -> list[tuple[str, str, Handler, Json]]:
    """Method, path, handler and OpenAPI operation of each endpoint, in the order of `/openapi.json`."""
    return [
        ("POST", "/v1/chat/completions", api.chat, _CHAT),
        ("POST", "/v1/completions", api.completions, _COMPLETIONS),
        ("POST", "/v1/responses", responses.create, _RESPONSES),
        ("POST", "/v1/embeddings", model.embeddings, _EMBEDDINGS),
        ("POST", "/tokenize", model.tokenize, _TOKENIZE),
        ("POST", "/detokenize", model.detokenize, _DETOKENIZE),
        ("GET", "/v1/models", model.models, _MODELS),
        ("GET", "/v1/models/{name:path}", model.model, _MODEL),
        ("GET", "/v1/responses/{response_id:path}", responses.retrieve, _RESPONSE),
        ("GET", "/v1/cluster", operations.cluster, _CLUSTER),
        ("GET", "/v1/figures", operations.figures, _FIGURES),
        ("GET", "/v1/requests/{request_id:path}/explain", operations.explain, _EXPLAIN),
        ("GET", "/v1/explain/{request_id:path}", operations.explain, _EXPLAIN),
        ("GET", "/health", operations.health, _HEALTH),
        ("GET", "/ready", operations.ready, _READY),
        ("GET", "/metrics", operations.metrics, _METRICS),
        ("GET", "/metrics/cluster", operations.cluster_metrics, _METRICS),
        ("GET", "/version", operations.version, _VERSION),
        ("GET", "/dashboard", operations.dashboard, _DASHBOARD),
        ("DELETE", "/v1/responses/{response_id:path}", responses.delete, _DELETE_RESPONSE),
    ]


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


# What the document says

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "predicted_ttft_s": {"type": "number", "description": "with code overloaded"},
                "predicted_tbt_s": {"type": "number", "description": "with code overloaded"},
            },
        }
    },
}

_COUNT: Json = {"type": "integer", "minimum": 0}
_TEXT: Json = {"type": "string"}

# Every endpoint may refuse so: keys, limits and the cluster's state come before all of them.
_REFUSALS: Mapping[int, str] = {
    401: "missing or wrong API key",
    413: "the body is larger than accepted",
    429: "a limit of the key is reached, or no instance can meet the objectives; Retry-After says when to come again",
    500: "a bug of the server",
    503: "no worker, or the server is shutting down",
    504: "the request took longer than its time limit",
}
# Endpoints that read a body.
_BODY_REFUSALS: Mapping[int, str] = {
    400: "a parameter is wrong, unknown to the model or not supported; `param` names it",
    404: "no such model",
    408: "the body did not arrive in time",
    **_REFUSALS,
}


def _document(
    *,
    summary: str,
    body: type[BaseModel] | Json | None = None,
    reply: Json | None = None,
    media_type: str = "application/json",
    streams: bool = False,
    path: Sequence[str] = (),
    refusals: Mapping[int, str] | None = None,
) -> Json:
    """An operation. `streams`: it may answer with server-sent events; `path`: names of parameters in the path."""
    content: Json = {media_type: {"schema": reply or {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    errors = _BODY_REFUSALS if body is not None else _REFUSALS
    operation: Json = {
        "summary": summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{str(code): _error(why) for code, why in {**errors, **(refusals or {})}.items()},
        },
        "security": [{}, {"bearer": []}],
    }
    if body is not None:
        schema = body if isinstance(body, dict) else _schema_of(body)
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if path:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in path
        ]
    return operation


def _error(why: str) -> Json:
    return {"description": why, "content": {"application/json": {"schema": _ERROR}}}


def _schema_of(model: type[BaseModel]) -> Json:
    """A body's schema without references; our models do not refer to themselves."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    inlined: Json = _inline(schema, schema.pop("$defs", {}))
    return inlined


def _responses_body() -> Json:
    """The body of `/v1/responses`, with the parameters that it shares with chat completions."""
    schema = _schema_of(ResponsesBody)
    chat = _schema_of(ChatBody)["properties"]
    shared = {name: chat[name] for name in SHARED if name in chat}
    return {**schema, "properties": {**shared, **schema["properties"]}}


def _inline(schema: Any, definitions: Json) -> Any:
    if isinstance(schema, list):
        return [_inline(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inline(part, definitions) for name, part in schema.items()}


def _object(**properties: Any) -> Json:
    """All of them are there; more may be."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_FINISH: Json = {"enum": ["stop", "length", "tool_calls"]}
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_HEAD = {"id": _TEXT, "created": _COUNT, "model": _TEXT}

_CHAT_REPLY = _object(
    **_HEAD,
    object={"const": "chat.completion"},
    choices=_list(
        _object(
            index=_COUNT,
            message=_object(role={"const": "assistant"}, content={"type": ["string", "null"]}),
            logprobs={"type": ["object", "null"]},
            finish_reason=_FINISH,
        )
    ),
    usage=_USAGE,
)
_COMPLETION_REPLY = _object(
    **_HEAD,
    object={"const": "text_completion"},
    choices=_list(
        _object(
            index=_COUNT, text=_TEXT, logprobs={"type": ["object", "null"]}, finish_reason=_FINISH
        )
    ),
    usage=_USAGE,
)
_RESPONSE_REPLY = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_COUNT,
    model=_TEXT,
    status={"enum": ["completed", "incomplete"]},
    output=_list(_object(type={"enum": ["message", "function_call"]}, id=_TEXT)),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
)
_DELETED_REPLY = _object(id=_TEXT, object={"const": "response"}, deleted={"const": True})
_MODEL_REPLY = _object(
    id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, vocab_size=_COUNT
)
_MODELS_REPLY = _object(object={"const": "list"}, data=_list(_MODEL_REPLY))
_TOKENIZE_REPLY = _object(
    count=_COUNT,
    max_model_len=_COUNT,
    tokens=_list(_COUNT),
    token_strs={"type": ["array", "null"], "items": _TEXT},
)
_DETOKENIZE_REPLY = _object(prompt=_TEXT)
_STATUS_REPLY = _object(status=_TEXT)
_VERSION_REPLY = _object(version=_TEXT)
_EXPLAIN_REPLY = _object(request_id=_TEXT, decisions=_list({"type": "object"}))
_CLUSTER_REPLY = _object(
    ready={"type": "boolean"}, models=_list(_TEXT), instances=_list({"type": "object"})
)
_FIGURES_REPLY = _object(
    window_s={"type": "number"},
    ttft_s={"type": "object"},
    tbt_s={"type": "object"},
    slo={"type": "object"},
    phases={"type": "object"},
    totals={"type": "object"},
    rejections={"type": "object"},
    failures={"type": "object"},
    rails=_list({"type": "object"}),
)
_EMBEDDINGS_BODY: Json = {
    "type": "object",
    "properties": {"model": _TEXT, "input": {}},
}

_NOT_FOUND = {404: "it is not known, or not any more"}

_CHAT = _document(summary="A chat completion", body=ChatBody, reply=_CHAT_REPLY, streams=True)
_COMPLETIONS = _document(
    summary="Completions of one prompt or several",
    body=CompletionBody,
    reply=_COMPLETION_REPLY,
    streams=True,
)
_RESPONSES = _document(
    summary="A response, which a later one may continue",
    body=_responses_body(),
    reply=_RESPONSE_REPLY,
    streams=True,
)
_RESPONSE = _document(
    summary="A response that is remembered",
    reply=_RESPONSE_REPLY,
    path=["response_id"],
    refusals=_NOT_FOUND,
)
_DELETE_RESPONSE = _document(
    summary="Forgets a response", reply=_DELETED_REPLY, path=["response_id"], refusals=_NOT_FOUND
)
_EMBEDDINGS = _document(
    summary="Refused with 400: the model predicts tokens and was not trained to make embeddings",
    body=_EMBEDDINGS_BODY,
)
_TOKENIZE = _document(
    summary="The tokens of a text or a conversation", body=TokenizeBody, reply=_TOKENIZE_REPLY
)
_DETOKENIZE = _document(summary="The text of tokens", body=DetokenizeBody, reply=_DETOKENIZE_REPLY)
_MODELS = _document(summary="The models that are served", reply=_MODELS_REPLY)
_MODEL = _document(summary="One model", reply=_MODEL_REPLY, path=["name"], refusals=_NOT_FOUND)
_CLUSTER = _document(summary="What runs where", reply=_CLUSTER_REPLY)
_FIGURES = _document(summary="The last minute in figures", reply=_FIGURES_REPLY)
_EXPLAIN = _document(
    summary="Why a request went where it went",
    reply=_EXPLAIN_REPLY,
    path=["request_id"],
    refusals=_NOT_FOUND,
)
_HEALTH = _document(summary="The process lives", reply=_STATUS_REPLY)
_READY = _document(summary="A request would be served", reply=_STATUS_REPLY)
_METRICS = _document(summary="Prometheus metrics", reply=_TEXT, media_type="text/plain")
_VERSION = _document(summary="The version of the software", reply=_VERSION_REPLY)
_DASHBOARD = _document(
    summary="The cluster's state for people", reply=_TEXT, media_type="text/html"
)
