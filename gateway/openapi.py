"""What `/openapi.json` says: of each endpoint its body, its parameters, and every reply that it can give. Pure.

Bodies are the schemas of the models that check them, so that the document cannot promise another thing than is checked.
Replies have open schemas: what is named is there, more may be. The framework's own documentation is not used: it never
sees a body (`gateway.body` reads it, bounded).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gateway.responses.schema import SHARED, ResponsesBody
from gateway.wishes.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

Json = dict[str, Any]

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

# Of every endpoint, since keys, limits and the cluster's state stand before all.
_REFUSALS: Mapping[int, str] = {
    401: "missing or wrong API key",
    413: "the body is larger than accepted",
    429: "a limit of the key is reached, or no instance can meet the objectives; Retry-After says when to come again",
    500: "a bug of the server",
    503: "no worker, or the server is shutting down",
    504: "the request took longer than its time limit",
}
# Of those that read a body.
_BODY_REFUSALS: Mapping[int, str] = {
    400: "a parameter is wrong, unknown to the model or not supported; `param` names it",
    404: "no such model",
    408: "the body did not arrive in time",
    **_REFUSALS,
}


def document(
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
        schema = body if isinstance(body, dict) else schema_of(body)
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


def schema_of(model: type[BaseModel]) -> Json:
    """A body's schema without references; our models do not refer to themselves."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    inlined: Json = _inline(schema, schema.pop("$defs", {}))
    return inlined


def responses_body() -> Json:
    """Of `/v1/responses`, with what it shares with chat completions."""
    schema = schema_of(ResponsesBody)
    chat = schema_of(ChatBody)["properties"]
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
_BEARER = {"type": "http", "scheme": "bearer"}

CHAT = document(summary="A chat completion", body=ChatBody, reply=_CHAT_REPLY, streams=True)
COMPLETIONS = document(
    summary="Completions of one prompt or several",
    body=CompletionBody,
    reply=_COMPLETION_REPLY,
    streams=True,
)
RESPONSES = document(
    summary="A response, which a later one may continue",
    body=responses_body(),
    reply=_RESPONSE_REPLY,
    streams=True,
)
RESPONSE = document(
    summary="A response that is remembered",
    reply=_RESPONSE_REPLY,
    path=["response_id"],
    refusals=_NOT_FOUND,
)
DELETE_RESPONSE = document(
    summary="Forgets a response", reply=_DELETED_REPLY, path=["response_id"], refusals=_NOT_FOUND
)
EMBEDDINGS = document(
    summary="Refused with 400: the model predicts tokens and was not trained to make embeddings",
    body=_EMBEDDINGS_BODY,
)
TOKENIZE = document(
    summary="The tokens of a text or a conversation", body=TokenizeBody, reply=_TOKENIZE_REPLY
)
DETOKENIZE = document(summary="The text of tokens", body=DetokenizeBody, reply=_DETOKENIZE_REPLY)
MODELS = document(summary="The models that are served", reply=_MODELS_REPLY)
MODEL = document(summary="One model", reply=_MODEL_REPLY, path=["name"], refusals=_NOT_FOUND)
CLUSTER = document(summary="What runs where", reply=_CLUSTER_REPLY)
FIGURES = document(summary="The last minute in figures", reply=_FIGURES_REPLY)
EXPLAIN = document(
    summary="Why a request went where it went",
    reply=_EXPLAIN_REPLY,
    path=["request_id"],
    refusals=_NOT_FOUND,
)
HEALTH = document(summary="The process lives", reply=_STATUS_REPLY)
READY = document(summary="A request would be served", reply=_STATUS_REPLY)
METRICS = document(summary="Prometheus metrics", reply=_TEXT, media_type="text/plain")
VERSION = document(summary="The version of the software", reply=_VERSION_REPLY)
DASHBOARD = document(summary="The cluster's state for people", reply=_TEXT, media_type="text/html")
