"""Replies that are not streamed, as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gateway.replies.chunks import Heading, Wants
from gateway.replies.feed import Piece
from gateway.replies.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from gateway.text.tokenizer import Tokenizer
from protocol.request import Token

MessageOf = Callable[[Sequence[Piece]], tuple[dict[str, Any], str | None]]
"""A choice's message, and why it ended, from its pieces."""


def render_chat(
    heading: Heading,
    wants: Wants,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    choices: Sequence[Sequence[Piece]],
    usage: dict[str, Any],
    message_of: MessageOf | None = None,
) -> bytes:
    """A `chat.completion`; `choices` are the pieces of each. `message_of`: None = their text is the message."""
    rendered = []
    for index, pieces in enumerate(choices):
        tokens = _tokens(pieces)
        message, finish_reason = (message_of or _text_message)(pieces)
        rendered.append(
            {
                "index": index,
                "message": message,
                "logprobs": {"content": chat_logprobs(tokens, tokenizer)}
                if wants.logprobs
                else None,
                "finish_reason": finish_reason,
                **_token_ids(wants, tokens),
            }
        )
    prompt = _prompt(wants, tokenizer, prompt_token_ids, choices[0])
    return _body("chat.completion", heading, rendered, usage, prompt)


def render_completion(
    heading: Heading,
    wants: Wants,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[Sequence[int]],
    echoes: Sequence[str],
    choices: Sequence[Sequence[Piece]],
    usage: dict[str, Any],
) -> bytes:
    """A `text_completion`; one entry of the sequences per choice."""
    rendered = []
    for index, pieces in enumerate(choices):
        tokens = _tokens(pieces)
        logprobs = None
        if wants.logprobs:
            logprobs, _ = completion_logprobs(
                tokens,
                tokenizer,
                len(echoes[index]),
                skip_special_tokens=wants.skip_special_tokens,
            )
            found, num_top = pieces[0].prompt_logprobs, wants.echoed_logprobs
            if found is not None and num_top is not None:
                ids = prompt_token_ids[index]
                logprobs = joined(
                    echoed_logprobs(ids, echoes[index], found, num_top, tokenizer), logprobs
                )
        prompt = _prompt(wants, tokenizer, prompt_token_ids[index], pieces)
        rendered.append(
            {
                "index": index,
                "text": echoes[index] + _text(pieces),
                "logprobs": logprobs,
                "finish_reason": pieces[-1].finish_reason,
                **prompt,
                **_token_ids(wants, tokens),
            }
        )
    return _body("text_completion", heading, rendered, usage, {})


def _body(
    kind: str,
    heading: Heading,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
    extra: dict[str, Any],
) -> bytes:
    body = {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        "choices": choices,
        "usage": usage,
        **extra,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _prompt(
    wants: Wants, tokenizer: Tokenizer, token_ids: Sequence[int], pieces: Sequence[Piece]
) -> dict[str, Any]:
    """What the client wants to see of a prompt; `pieces`: of a choice of it."""
    told: dict[str, Any] = {"prompt_token_ids": token_ids} if wants.token_ids else {}
    if wants.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(
            token_ids, pieces[0].prompt_logprobs, wants.prompt_logprobs, tokenizer
        )
    return told


def _text_message(pieces: Sequence[Piece]) -> tuple[dict[str, Any], str | None]:
    message = {"role": "assistant", "content": _text(pieces), "refusal": None}
    return message, pieces[-1].finish_reason


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Sequence[Piece]) -> list[Token]:
    return [token for piece in pieces for token in piece.tokens]


def _token_ids(wants: Wants, tokens: Sequence[Token]) -> dict[str, Any]:
    return {"token_ids": [token.token_id for token in tokens]} if wants.token_ids else {}
