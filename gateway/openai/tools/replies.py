"""Replies that may contain calls, in OpenAI's form: stream deltas and whole messages. Pure except for ids of calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from gateway.generation.events import Piece
from gateway.openai.chunks import ChatChunks, Heading, Wants
from gateway.openai.tools.formats import Called, Told
from gateway.openai.tools.plan import ToolPlan
from gateway.text.tokenizer import Tokenizer
from protocol.request import FinishReason


class ToolChunks(ChatChunks):
    """Chunks of an answer that may call. A stream reports a call as soon as it is certain; a whole reply only calls
    that do not break."""

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
        parser.push(piece.text)
        if reason is not None:
            parser.finish(is_cut=reason is FinishReason.LENGTH)
        # The finish reason is the calls unless the answer was cut off.
        called = reason is FinishReason.STOP and parser.num_calls
        return _delta_of(parser.taken()), "tool_calls" if called else reason


def _delta_of(told: Told) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": told.content} if told.content else {}
    if told.calls:
        delta["tool_calls"] = [_call(*each) for each in told.calls.items()]
    return delta


def _call(index: int, called: Called) -> dict[str, Any]:
    if called.name is None:
        return {"index": index, "function": {"arguments": called.arguments}}
    function = {"name": called.name, "arguments": called.arguments}
    call_id = f"call_{secrets.token_hex(12)}"
    return {"index": index, "id": call_id, "type": "function", "function": function}
