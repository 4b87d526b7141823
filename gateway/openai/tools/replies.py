"""Answers that may call, in OpenAI's form: whole messages, and deltas of streams. Pure but for the ids of calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.generation.events import Piece
from gateway.openai.chunks import ChatChunks, Heading, Wants
from gateway.openai.tools.parser import Arguments, CallStarted, Content, Event
from gateway.openai.tools.plan import ToolPlan
from gateway.text.tokenizer import Tokenizer
from protocol.request import FinishReason

CALLED = "tool_calls"


def message_of(plan: ToolPlan, pieces: Sequence[Piece]) -> tuple[dict[str, Any], str | None]:
    """One choice's message, and why it ended."""
    parser = plan.parser(is_eager=False)
    events = [event for piece in pieces for event in parser.push(piece.text)]
    reason = pieces[-1].finish_reason
    events += parser.finish(is_cut=reason is FinishReason.LENGTH)
    delta = Delta()
    delta.add(events)
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    calls = delta.calls()
    if calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls
        ]
    return message, _reason(reason, parser.num_calls)


class ToolChunks(ChatChunks):
    """`chat.completion.chunk` of answers that may call."""

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        prompt_token_ids: Sequence[int],
        plan: ToolPlan,
    ) -> None:
        super().__init__(
            heading, wants, tokenizer, num_choices=num_choices, prompt_token_ids=prompt_token_ids
        )
        self._parsers = [plan.parser(is_eager=True) for _ in range(num_choices)]

    def piece(self, piece: Piece) -> str:
        parser, reason = self._parsers[piece.index], piece.finish_reason
        delta = Delta()
        delta.add(parser.push(piece.text))
        if reason is not None:
            delta.add(parser.finish(is_cut=reason is FinishReason.LENGTH))
        wants = self._wants
        if not (delta or reason or wants.token_ids or wants.logprobs):
            return ""
        ended = _reason(reason, parser.num_calls)
        return self._around(piece.index, delta.to_json(), piece.tokens, ended)


class Delta:
    """Events joined: one entry per call."""

    def __init__(self) -> None:
        self.content = ""
        self._calls: dict[int, dict[str, Any]] = {}  # by index

    def __bool__(self) -> bool:
        return bool(self.content or self._calls)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case CallStarted(index, name):
                    self._calls[index] = {
                        "index": index,
                        "id": f"call_{secrets.token_hex(12)}",
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case Arguments(index, text):
                    entry = self._calls.setdefault(
                        index, {"index": index, "function": {"arguments": ""}}
                    )
                    entry["function"]["arguments"] += text

    def calls(self) -> list[dict[str, Any]]:
        return list(self._calls.values())

    def to_json(self) -> str:
        parts = []
        if self.content:
            parts.append(f'"content":{encode_basestring_ascii(self.content)}')
        if self._calls:
            parts.append(f'"tool_calls":{json.dumps(self.calls(), separators=(",", ":"))}')
        return f'"delta":{{{",".join(parts)}}}'


def _reason(reason: FinishReason | None, num_calls: int) -> str | None:
    """Calls are why it ended, unless it was cut off."""
    return CALLED if reason is FinishReason.STOP and num_calls else reason
