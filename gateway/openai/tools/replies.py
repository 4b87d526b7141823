"""Answers that may call, in OpenAI's form: deltas of streams, and whole messages. Pure but for the ids of calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.generation.events import Piece
from gateway.openai.chunks import ChatChunks, Heading, Wants
from gateway.openai.tools.formats import Arguments, CallStarted, Content, Event
from gateway.openai.tools.plan import ToolPlan
from gateway.text.tokenizer import Tokenizer
from protocol.request import FinishReason


class ToolChunks(ChatChunks):
    """Of answers that may call. A stream tells of a call as soon as it is certain; a whole reply of calls that do not
    break."""

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[Sequence[int]],
        plan: ToolPlan,
        *,
        is_stream: bool,
    ) -> None:
        super().__init__(heading, wants, tokenizer, prompt_token_ids)
        self._parsers = [plan.parser(is_eager=is_stream) for _ in prompt_token_ids]

    def piece(self, piece: Piece) -> str:
        choice, wants = self.choice(piece), self._wants
        shows = choice["delta"] or choice["finish_reason"] or wants.token_ids or wants.logprobs
        return self._chunk(choice) if shows else ""

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        parser, reason = self._parsers[piece.index], piece.finish_reason
        events = parser.push(piece.text)
        if reason is not None:
            events += parser.finish(is_cut=reason is FinishReason.LENGTH)
        # Calls are why it ended, unless it was cut off.
        called = reason is FinishReason.STOP and parser.num_calls
        return delta_of(events), "tool_calls" if called else reason


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """Events joined: one entry per call."""
    content, calls = "", dict[int, dict[str, Any]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStarted(index, name):
                function = {"name": name, "arguments": ""}
                call_id = f"call_{secrets.token_hex(12)}"
                calls[index] = {"index": index, "id": call_id, "type": "function"}
                calls[index]["function"] = function
            case Arguments(index, text):
                more = {"index": index, "function": {"arguments": ""}}
                calls.setdefault(index, more)["function"]["arguments"] += text
    told: dict[str, Any] = {"content": content} if content else {}
    return told | ({"tool_calls": list(calls.values())} if calls else {})
