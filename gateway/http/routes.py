"""The ASGI application: routes, their description in `/openapi.json`, and errors in OpenAI's form.

The document contains the schemas of the models that validate bodies, so it always matches the validation. Schemas of
replies are open: the named fields are present, others may be. FastAPI's own documentation is not used, because FastAPI
never sees a body (`gateway.http.connection` reads it, bounded). Paths without parameters bypass FastAPI's routing,
which takes a third of a millisecond of every first token: the middleware looks them up.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from moonserve.gateway.access.api_key import KeyLimits
from moonserve.gateway.access.key_table import KeyTable
from moonserve.gateway.access.rate_limit_service import RateLimiter
from moonserve.gateway.errors import ApiError, reply_for
from moonserve.gateway.http.middleware import GatewayMiddleware, Handler
from moonserve.gateway.http.operator_endpoints import OperatorEndpoints
from moonserve.gateway.openai.chat_completions import ChatCompletions
from moonserve.gateway.openai.messages_api import MessagesApi, MessagesBody
from moonserve.gateway.openai.request_schema import ChatBody, CompletionBody
from moonserve.gateway.openai.responses_api import ResponsesApi
from moonserve.gateway.openai.responses_api_schema import SHARED, ResponsesBody
from moonserve.gateway.served_model import DetokenizeBody, ServedModel, TokenizeBody
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.process.metrics import package_version

Json = dict[str, Any]


def build_app(routes: "Sequence[Route]", keys: KeyTable, limiter: RateLimiter, limits: KeyLimits) -> ASGIApp:
    """Builds the whole HTTP interface. `limits`: limits of keys that have none of their own."""
    app = FastAPI(
        title="moonserve",
        version=package_version(),
        redirect_slashes=False,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        exception_handlers={
            ApiError: _on_error,
            MoonserveError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_error,  # re-raised after the reply, so that the middleware logs it
        },
    )
    for route in routes:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            response_model=None,
            operation_id=f"{route.method.lower()} {route.path}",
            openapi_extra=route.document(),
        )
    direct = {(route.method, route.path): route.handler for route in routes if "{" not in route.path}
    return GatewayMiddleware(app, direct, keys, limiter, limits)


def routes_of(
    api: ChatCompletions,
    model: ServedModel,
    responses: ResponsesApi,
    messages: MessagesApi,
    operations: OperatorEndpoints,
) -> "list[Route]":
    """Returns the routes in the order of `/openapi.json`."""
    response, status, ops = "/v1/responses/{response_id:path}", _object(status=_TEXT), operations
    explained = "/v1/requests/{request_id:path}/explain"
    chats, completions = "/v1/chat/completions", "/v1/completions"
    return [
        Route("POST", chats, api.chat, "A chat completion", _CHAT, ChatBody, streams=True),
        Route(
            "POST", completions, api.completions, "Completions of one prompt or several", _COMPLETION,
            CompletionBody, streams=True,
        ),
        Route(
            "POST", "/v1/responses", responses.create, "A response, which a later one may continue",
            _RESPONSE, _responses_body(), streams=True,
        ),
        Route(
            "POST", "/v1/messages", messages.create, "A message in Anthropic's API", _ANTHROPIC,
            MessagesBody, streams=True,
        ),
        Route(
            "POST", "/v1/messages/count_tokens", messages.count_tokens, "The length of its prompt",
            _object(input_tokens=_COUNT), MessagesBody,
        ),
        Route("POST", "/v1/embeddings", model.embeddings, "Refused: no model of this server makes embeddings", body={}),
        Route("POST", "/tokenize", model.tokenize, "The tokens of a text", _TOKENIZED, TokenizeBody),
        Route(
            "POST", "/detokenize", model.detokenize, "The text of tokens", _object(prompt=_TEXT),
            DetokenizeBody,
        ),
        Route("GET", "/v1/models", model.models, "The models that are served", _MODELS),
        Route("GET", "/v1/models/{name:path}", model.model, "One model", _MODEL),
        Route("GET", response, responses.retrieve, "A stored response", _RESPONSE),
        Route("GET", "/v1/cluster", ops.cluster, "Instances and their load", _CLUSTER),
        Route("GET", "/v1/figures", ops.figures, "Figures of the last minute", _FIGURES),
        Route("GET", "/v1/history", ops.history, "The last hour: points behind number `after`", _HISTORY),
        Route("GET", "/v1/instances/{instance_id}/steps", ops.steps, "A worker's latest steps", _STEPS),
        Route("GET", explained, ops.explain, "Reasons for a request's placement", _EXPLAINED),
        Route("GET", "/health", ops.health, "Liveness: the process is running", status),
        Route("GET", "/ready", ops.ready, "Readiness: a request would be served", status),
        Route("GET", "/metrics", ops.metrics, "Prometheus metrics", media_type="text/plain"),
        Route(
            "GET", "/metrics/cluster", ops.cluster_metrics, "Prometheus metrics of all processes",
            media_type="text/plain",
        ),
        Route("GET", "/version", ops.version, "Version of the software", _object(version=_TEXT)),
        Route("GET", "/", ops.chat, "A chat with the model", media_type="text/html"),
        Route("GET", "/dashboard", ops.dashboard, "The cluster's state", media_type="text/html"),
        Route("GET", "/assets/{name}", ops.asset, "A file of these pages", media_type="text/*"),
        Route("DELETE", response, responses.delete, "Deletes a stored response", _DELETED),
    ]  # fmt: skip


async def _on_error(request: Request, error: Exception) -> Response:
    return reply_for(error).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Handles the router's own errors: unknown path, wrong method."""
    if not isinstance(error, HTTPException):
        raise error
    messages = {
        404: f"no endpoint exists at {request.url.path}",
        405: f"{request.method} is not allowed at {request.url.path}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    refusal = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code=codes.get(error.status_code),
        headers=error.headers,
    )
    return await _on_error(request, refusal)


# The OpenAPI document

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

# Errors of every endpoint: keys, limits and the cluster's state are checked first.
_REFUSALS: Mapping[int, str] = {
    401: "the API key is missing or wrong",
    413: "the body is larger than accepted",
    429: "a limit of the key is reached, or no instance can meet the objectives; Retry-After says when to try again",
    500: "a bug of the server",
    503: "no worker, or the server is shutting down",
    504: "the request took longer than its time limit",
}
# Errors of endpoints that read a body.
_BODY_REFUSALS: Mapping[int, str] = {
    400: "a parameter is wrong, unknown to the model or not supported; `param` names it",
    404: "no such model",
    408: "the body did not arrive in time",
    **_REFUSALS,
}


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint and its description in the document."""

    method: str
    path: str
    handler: Handler
    summary: str
    reply: Json = field(default_factory=lambda: _TEXT)
    body: type[BaseModel] | Json | None = None
    media_type: str = "application/json"
    streams: bool = False  # may answer with server-sent events

    def document(self) -> Json:
        """Returns the endpoint's OpenAPI operation."""
        content: Json = {self.media_type: {"schema": self.reply}}
        if self.streams:
            content["text/event-stream"] = {"schema": _TEXT}
        named = re.findall(r"{(\w+)", self.path)
        errors = _BODY_REFUSALS if self.body is not None else _REFUSALS
        if named:
            errors = {**errors, 404: "it is unknown, or no longer stored"}
        operation: Json = {
            "summary": self.summary,
            "responses": {
                "200": {"description": "the answer", "content": content},
                **{str(code): _error(why) for code, why in errors.items()},
            },
            "security": [{}, {"bearer": []}],
            "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named],
        }
        if self.body is not None:
            schema = self.body if isinstance(self.body, dict) else _schema_of(self.body)
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        return operation


def _error(why: str) -> Json:
    return {"description": why, "content": {"application/json": {"schema": _ERROR}}}


def _schema_of(model: type[BaseModel]) -> Json:
    """Returns a body's schema with references inlined. The models must not be recursive."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    inlined: Json = _inline(schema, schema.pop("$defs", {}))
    return inlined


def _responses_body() -> Json:
    """Returns the schema of the body of `/v1/responses`, including parameters shared with chat completions."""
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
    """Returns an object schema in which all given properties are required and others are allowed."""
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

_LOGPROBS: Json = {"type": ["object", "null"]}
_CONTENT: Json = {"type": ["string", "null"]}
_MESSAGE = _object(role={"const": "assistant"}, content=_CONTENT)
_ENDED = {"index": _COUNT, "logprobs": _LOGPROBS, "finish_reason": _FINISH}
_CHAT = _object(
    **_HEAD, object={"const": "chat.completion"}, choices=_list(_object(**_ENDED, message=_MESSAGE)), usage=_USAGE
)
_COMPLETION = _object(
    **_HEAD, object={"const": "text_completion"}, choices=_list(_object(**_ENDED, text=_TEXT)), usage=_USAGE
)
_RESPONSE = _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_COUNT,
    model=_TEXT,
    status={"enum": ["completed", "incomplete"]},
    output=_list(_object(type={"enum": ["message", "function_call"]}, id=_TEXT)),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
)
_ANTHROPIC = _object(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_object(type={"enum": ["text", "tool_use"]})),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence=_CONTENT,
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, cache_read_input_tokens=_COUNT),
)
_DELETED = _object(id=_TEXT, object={"const": "response"}, deleted={"const": True})
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, vocab_size=_COUNT)
_MODELS = _object(object={"const": "list"}, data=_list(_MODEL))
_STRINGS: Json = {"type": ["array", "null"], "items": _TEXT}
_TOKENIZED = _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_STRINGS)
_ANY: Json = {"type": "object"}
_EXPLAINED = _object(request_id=_TEXT, decisions=_list(_ANY))
_CLUSTER = _object(ready={"type": "boolean"}, models=_list(_TEXT), instances=_list(_ANY))
_STEPS = _object(instance_id=_TEXT, steps=_list(_ANY))
_NUMBERS = _list({"type": "number"})
_HISTORY = _object(interval_s={"type": "number"}, number=_COUNT, at=_NUMBERS, series=_ANY)
_FIGURE_GROUPS = ("ttft_s", "tbt_s", "slo", "phases", "totals", "rejections", "failures")
_FIGURES = _object(window_s={"type": "number"}, **dict.fromkeys(_FIGURE_GROUPS, _ANY), rails=_list(_ANY))
