"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API on top of chat completions.

    message_start ─► (content_block_start ─► deltas ─► content_block_stop)… ─► message_delta ─► message_stop

Content blocks are reasoning, text or calls of tools, one open at a time. Images and documents are refused. Streams
cannot be resumed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moonserve.gateway.errors import ApiError, invalid, unsupported
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.openai.chat_completions import ChatCompletions, ReplyPlan
from moonserve.gateway.openai.reply_format import ChatFormat, ReplyFormat
from moonserve.gateway.openai.request_schema import Body, ChatBody, validated
from moonserve.gateway.served_model import ServedModel

Json = dict[str, Any]
Blocks = str | list[Json]

_SHARED = ("model", "stream", "temperature", "top_p", "top_k", "kv_cache")
_IGNORED = frozenset({"service_tier", "container", "context_management", "output_config", "cache_control", "betas"})
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TTLS_S = {"5m": 300.0, "1h": 3_600.0}  # of `cache_control`
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {503: "overloaded_error", 504: "timeout_error"}


class MessagesBody(Body):
    """Body of both endpoints. Sampling parameters are `extra` here and validated as those of a chat completion."""

    messages: Annotated[list[Json], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    metadata: Json | None = None
    thinking: Json | None = None

    def check(self) -> set[str]:
        """Returns the names of unknown parameters. Raises ApiError (400) for unsupported ones."""
        given = self.model_extra or {}
        if given.get("mcp_servers"):
            raise unsupported("mcp_servers is not supported by this server", "mcp_servers")
        return given.keys() - set(_SHARED) - _IGNORED - {"mcp_servers"}


class MessagesApi:
    """Handlers of both endpoints, on top of the chat completions of a `ChatCompletions`."""

    def __init__(self, api: ChatCompletions, model: ServedModel) -> None:
        self._api = api
        self._model = model

    async def create(self, request: Request) -> Response:
        """POST /v1/messages"""
        body, plan = await self._plan(request)
        if body.max_tokens is None:
            raise invalid("max_tokens is missing", "max_tokens")
        assert isinstance(plan.reply_format, ChatFormat)
        num_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
        events = MessageEvents(plan.reply_format, plan.header.id, plan.header.model, num_tokens, body.stop_sequences)
        return await self._api.reply(request, replace(plan, reply_format=events))

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        _, plan = await self._plan(request)
        return JSONResponse({"input_tokens": sum(len(prompt.token_ids) for prompt in plan.prompts)})

    async def _plan(self, request: Request) -> tuple[MessagesBody, ReplyPlan]:
        body = validated(MessagesBody, await self._model.read(request))
        self._model.parser.warn_of_unknown(body.check())
        chat = self._model.parser.parse(ChatBody, json.dumps(to_chat_body(body)).encode())
        return body, await self._api.chat_plan(request, chat, "msg_")


def to_chat_body(body: MessagesBody) -> Json:
    """Returns the body of the chat completion. Raises ApiError for content without a chat equivalent."""
    given = body.model_extra or {}
    chat: Json = {name: given[name] for name in _SHARED if given.get(name) is not None}
    chat["stream_options"] = {"include_usage": True}
    system = [{"role": "system", "content": _text(body.system, "system")}] if body.system else []
    chat["messages"] = [*system, *_chat_messages(body.messages)]
    if ttls_s := list(_ttls_s([given, *(body.tools or ()), *_blocks(body)])):  # the longest one counts
        chat["kv_cache"] = {"ttl_s": max(ttls_s)} | (chat.get("kv_cache") or {})
    if body.messages[-1].get("role") == "assistant":  # the answer continues it
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.max_tokens is not None:
        chat["max_completion_tokens"] = body.max_tokens
    if body.stop_sequences:  # included, so that the answer tells which one ended it
        chat |= {"stop": body.stop_sequences, "include_stop_str_in_output": True}
    if body.metadata and isinstance(user := body.metadata.get("user_id"), str):
        chat["user"] = user
    if body.thinking and body.thinking.get("type") == "disabled":
        chat |= {"reasoning_effort": "none", "include_reasoning": False}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
        choice = body.tool_choice or {"type": "auto"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if choice.get("type") == "tool" else _TOOL_CHOICES.get(str(choice.get("type")))
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _blocks(body: MessagesBody) -> Iterator[object]:
    """Yields the content blocks of the system prompt and of all messages."""
    for content in (body.system, *(message.get("content") for message in body.messages)):
        yield from content if isinstance(content, list) else ()


def _ttls_s(parts: Iterable[object]) -> Iterator[float]:
    """Yields the retention that each part's `cache_control` asks for. Raises ApiError for one that is unknown."""
    for part in parts:
        control = part.get("cache_control") if isinstance(part, dict) else None
        if control is None:
            continue
        is_known = isinstance(control, dict) and control.get("type") == "ephemeral"
        ttl = str(control.get("ttl") or "5m") if is_known else ""
        if ttl not in _TTLS_S:
            raise invalid('cache_control: must be {"type": "ephemeral"} with a ttl of "5m" or "1h"', "cache_control")
        yield _TTLS_S[ttl]


def _chat_messages(messages: Sequence[Json]) -> Iterator[Json]:
    for number, message in enumerate(messages):
        where, role = f"messages[{number}]", message.get("role")
        if role not in ("user", "assistant"):
            raise invalid(f"{where}.role: must be user or assistant, not {role!r}", where)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise invalid(f"{where}.content: must be a string or a list of blocks", where)
        yield from _assistant(blocks, where) if role == "assistant" else _user(blocks, where)


def _assistant(blocks: Sequence[Json], where: str) -> Iterator[Json]:
    thinking = [str(block.get("thinking", "")) for block in blocks if block.get("type") == "thinking"]
    blocks = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking")]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    message: Json = {"role": "assistant", "content": _text([b for b in blocks if b not in calls], where)}
    if thinking:
        message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": json.dumps(call.get("input") or {})},
            }
            for call in calls
        ]
    yield message


def _user(blocks: Sequence[Json], where: str) -> Iterator[Json]:
    """Yields the results of tools, then the user's own text."""
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for result in results:
        text = _text(result.get("content") or "", where)
        yield {"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": text}
    if len(results) < len(blocks):
        yield {"role": "user", "content": _text([block for block in blocks if block not in results], where)}


def _text(given: object, where: str) -> str:
    """Returns the text of a string or of blocks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise invalid(f"{where}: must be a string or a list of blocks", where)
    for block in given:
        kind = block.get("type") if isinstance(block, dict) else block
        if kind != "text" or not isinstance(block.get("text"), str):
            raise unsupported(f"{where}: blocks of type {kind!r} are not supported, only text", where)
    return "\n".join(block["text"] for block in given)


def _tool(tool: Mapping[str, Any]) -> Json:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise unsupported(f"tools: {tool.get('type')!r} is not supported, only tools with an input_schema", "tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function | {name: tool[name] for name in ("description",) if name in tool}}


class MessageEvents(ReplyFormat):
    """`ReplyFormat` of a message, built on the choices of its chat completion."""

    def __init__(
        self, chat_format: ChatFormat, id: str, model: str, num_tokens: int, stop_sequences: Sequence[str] | None
    ) -> None:
        """`num_tokens`: of the prompt."""
        self._chat_format = chat_format
        self._stops = sorted(stop_sequences or (), key=len, reverse=True)
        self._content: list[Json] = []  # the last block may be open
        self._call: int | None = None  # number of the open call; None: the open block, if any, is text or reasoning
        self._is_open = False
        self._message: Json = {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_tokens, "output_tokens": 0},
        }

    def first(self) -> str:
        return _event("message_start", message=self._message)

    def piece(self, piece: Piece) -> str:
        choice, events = self._chat_format.choice(piece), ""
        delta, reason = choice["delta"], choice["finish_reason"]
        calls = list(delta.get("tool_calls") or ())
        if calls and self._is_open and self._call == calls[0]["index"]:  # text in this delta follows the call
            events += self._add_call(calls.pop(0))
        if reasoning := delta.get("reasoning_content"):
            events += self._add_text("thinking", reasoning)
        text = delta.get("content") or ""
        if reason is not None:
            self._message["stop_reason"] = _STOP_REASONS[reason]
            stop = next((stop for stop in self._stops if text.endswith(stop)), None) if reason == "stop" else None
            if stop is not None:
                text = text.removesuffix(stop)
                self._message |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if text:
            events += self._add_text("text", text)
        return events + "".join(map(self._add_call, calls))

    def usage(self, usage: Json) -> str:
        """Returns the end of the open block and of the message."""
        events = self._close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._message["usage"] = {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
        ended = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        events += _event("message_delta", delta=ended, usage=self._message["usage"])
        return events + _event("message_stop")

    def failure(self, reply: ApiError) -> bytes:
        error = {"type": _ERROR_TYPES.get(reply.status, "api_error"), "message": reply.message}
        return _event("error", error=error).encode()

    def whole_body(self, pieces: Sequence[Piece], usage: Json) -> Json:
        for piece in pieces:
            self.piece(piece)
        self.usage(usage)
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"] or "{}")
        return {**self._message, "content": self._content}

    def _add_text(self, kind: str, text: str) -> str:
        """Adds text to a block of type `text` or `thinking`."""
        events = ""
        if not self._is_open or self._content[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._begin(None, {"type": kind, kind: "", **signature})
        self._content[-1][kind] += text
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: Json) -> str:
        function, events = call.get("function") or {}, ""
        if not self._is_open or self._call != call["index"]:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            events = self._begin(call["index"], block)
            self._content[-1] = {**block, "input": ""}
        arguments = function.get("arguments") or ""
        self._content[-1]["input"] += arguments
        return events + (self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else "")

    def _begin(self, call: int | None, block: Json) -> str:
        events = self._close()
        self._content.append(dict(block))
        self._call, self._is_open = call, True
        return events + _event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _close(self) -> str:
        was_open, self._is_open = self._is_open, False
        return _event("content_block_stop", index=len(self._content) - 1) if was_open else ""


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, separators=(',', ':'))}\n\n"
