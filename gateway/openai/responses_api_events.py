"""Events of one response, made of a chat completion's choices. Also builds the final response. Pure.

    created, in_progress ─► (item added ─► deltas ─► item done)… ─► completed | incomplete | failed

One output item is open at a time: reasoning or a message while text arrives, a function call while its arguments do.
Events are numbered in sequence. There is no `[DONE]`: the type of the last event shows that it is the last.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.openai.reply_format import ChatFormat, ReplyFormat, ReplyHeader
from moonserve.gateway.openai.responses_api_schema import ResponsesBody
from moonserve.gateway.text.message_parser import is_object

Item = dict[str, Any]


class ResponseEvents(ReplyFormat):
    """`ReplyFormat` of a response, built on the chunks of its chat completion."""

    def __init__(
        self,
        chat_format: ChatFormat,
        header: ReplyHeader,
        body: ResponsesBody,
        on_ended: Callable[[dict[str, Any]], None],
    ) -> None:
        """`on_ended` receives the response after it has ended without failure."""
        self._chat_format = chat_format
        self._id = header.id
        self._echoed = _echoed(header, body)
        self._on_ended = on_ended
        self._sequence_number = 0
        self._items: list[Item] = []  # finished items
        self._open: _OpenText | _OpenCall | None = None
        self._pending_logprobs: list[Any] = []  # log-probabilities of tokens whose text is still to come
        self._finish_reason = "stop"
        self._response: dict[str, Any] = {}  # set at the end

    def first(self) -> str:
        """Returns the events of a response's start."""
        response = {**self._echoed, "status": "in_progress"}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: Piece) -> str:
        """Returns events for new output."""
        return self._choice(self._chat_format.choice(piece))

    def usage(self, usage: dict[str, Any]) -> str:
        """Returns the end of the open item and the final event with the whole response."""
        text = ""
        if self._open is None and not self._items:
            text += self._begin(_OpenMessage(self._id, 0))
        text += self._close()
        is_cut = self._finish_reason == "length"
        self._response = {
            **self._echoed,
            "status": "incomplete" if is_cut else "completed",
            "output": list(self._items),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(self._chat_format.detailed(usage)),
        }
        self._on_ended(self._response)
        return text + self._event(f"response.{self._response['status']}", response=self._response)

    def whole_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        for piece in pieces:
            self.piece(piece)
        self.usage(usage)
        return self._response

    def failure(self, reply: ApiError) -> bytes:
        error = {"code": "server_error", "message": reply.message}
        response = {**self._echoed, "status": "failed", "error": error}
        return self._event("response.failed", response=response).encode()

    def _choice(self, choice: Mapping[str, Any]) -> str:
        delta, events = choice["delta"], ""
        calls = list(delta.get("tool_calls") or ())
        if calls and self._continues_open_call(calls[0]):  # text in this delta follows the call
            events += self._call(calls.pop(0))
        if reasoning := delta.get("reasoning_content"):
            events += self._text(_OpenReasoning, reasoning)
        self._pending_logprobs += (choice.get("logprobs") or {}).get("content") or []
        if delta.get("content"):
            events += self._text(_OpenMessage, delta["content"], self._pending_logprobs)
        events += "".join(map(self._call, calls))
        if delta.get("content") or isinstance(self._open, _OpenCall):  # log-probabilities of calls are not reported
            self._pending_logprobs = []
        # Set after the items of this delta: an item with a successor was not cut off.
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return events

    def _text(self, kind: "type[_OpenText]", text: str, logprobs: Sequence[Any] = ()) -> str:
        events = ""
        if type(self._open) is not kind:
            events += self._close() + self._begin(kind(self._id, len(self._items)))
        opened = self._open
        assert isinstance(opened, _OpenText)
        opened.text += text
        opened.logprobs += logprobs
        reported = {"logprobs": list(logprobs)} if kind is _OpenMessage else {}
        return events + self._event(f"response.{kind.part_type}.delta", **opened.place, delta=text, **reported)

    def _call(self, call: Mapping[str, Any]) -> str:
        events, function = "", call.get("function") or {}
        if not self._continues_open_call(call):
            events += self._close()
            events += self._begin(_OpenCall(self._id, len(self._items), call, function["name"]))
        opened_call = self._open
        assert isinstance(opened_call, _OpenCall)
        arguments = function.get("arguments") or ""
        if not arguments:
            return events
        opened_call.arguments += arguments
        return events + self._event("response.function_call_arguments.delta", **opened_call.place, delta=arguments)

    def _continues_open_call(self, call: Mapping[str, Any]) -> bool:
        """Returns True if the call is the open item."""
        return isinstance(self._open, _OpenCall) and self._open.number == call["index"]

    def _begin(self, opened: "_OpenText | _OpenCall") -> str:
        self._open = opened
        events = self._event("response.output_item.added", output_index=opened.index, item=opened.begun())
        if isinstance(opened, _OpenText):
            events += self._event("response.content_part.added", **opened.place, part=opened.part())
        return events

    def _close(self) -> str:
        """Ends the open item."""
        opened, self._open = self._open, None
        if opened is None:
            return ""
        item = opened.done(self._finish_reason)
        self._items.append(item)
        return "".join(self._event(kind, **fields) for kind, fields in opened.closing()) + self._event(
            "response.output_item.done", output_index=opened.index, item=item
        )

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


class _OpenText(ABC):
    """An item whose text is still arriving."""

    id_prefix = part_type = ""
    fields: Item = {}  # noqa: RUF012  # of the item

    def __init__(self, response_id: str, index: int) -> None:
        self.index = index
        self.text = ""
        self.logprobs: list[Any] = []
        self._item = {"id": f"{self.id_prefix}_{response_id}_{index}", **self.fields}

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self.index, "content_index": 0}

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """Returns the item's only part."""

    def begun(self) -> Item:
        return {**self._item, "status": "in_progress", "content": []}

    def done(self, finish_reason: str) -> Item:
        status = "incomplete" if finish_reason == "length" else "completed"
        return {**self._item, "status": status, "content": [self.part()]}

    def closing(self) -> Iterator[tuple[str, dict[str, Any]]]:
        done = {name: value for name, value in self.part().items() if name in ("text", "logprobs")}
        yield f"response.{self.part_type}.done", {**self.place, **done}
        yield "response.content_part.done", {**self.place, "part": self.part()}


class _OpenMessage(_OpenText):
    id_prefix, part_type = "msg", "output_text"
    fields = {"type": "message", "role": "assistant"}  # noqa: RUF012

    def part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}


class _OpenReasoning(_OpenText):
    id_prefix, part_type = "rs", "reasoning_text"
    fields = {"type": "reasoning", "summary": []}  # noqa: RUF012

    def part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self.text}


class _OpenCall:
    """A function call whose arguments are still arriving."""

    def __init__(self, response_id: str, index: int, call: Mapping[str, Any], name: str) -> None:
        self.index = index
        self.number: int = call["index"]  # index among the message's calls
        self.arguments = ""
        self._item = {
            "id": f"fc_{response_id}_{index}",
            "type": "function_call",
            "call_id": call["id"],
            "name": name,
        }

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self.index}

    def begun(self) -> Item:
        return {**self._item, "status": "in_progress", "arguments": ""}

    def done(self, finish_reason: str) -> Item:
        is_cut = finish_reason == "length" and not is_object(self.arguments)
        status = "incomplete" if is_cut else "completed"
        return {**self._item, "status": status, "arguments": self.arguments}

    def closing(self) -> Iterator[tuple[str, dict[str, Any]]]:
        named = {"name": self._item["name"], "arguments": self.arguments}
        yield "response.function_call_arguments.done", {**self.place, **named}


# The response object


def _echoed(header: ReplyHeader, body: ResponsesBody) -> dict[str, Any]:
    """Returns the fields that all states of one response share."""
    given = body.model_extra or {}
    return {
        "id": header.id,
        "object": "response",
        "created_at": header.created,
        "model": header.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning_effort, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if given.get("temperature") is None else given["temperature"],
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if given.get("top_p") is None else given["top_p"],
        "truncation": "disabled",
        "user": given.get("user"),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
    }


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a chat completion's usage under the names of this API."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
