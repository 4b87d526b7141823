"""Log-probabilities in OpenAI's two forms: per-token objects for chat, parallel lists for completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.tokenizer import Tokenizer
from protocol.request import Token

# JSON has no -inf; vLLM and OpenAI send this in its place.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat completions."""
    return [
        {
            **_entry(token.token_id, token.logprobs.sampled, tokenizer),
            "top_logprobs": [
                _entry(token_id, logprob, tokenizer) for token_id, logprob in token.logprobs.top
            ],
        }
        for token in tokens
        if token.logprobs is not None
    ]


def completion_logprobs(
    tokens: Sequence[Token], tokenizer: Tokenizer, first_offset: int
) -> tuple[dict[str, Any], int]:
    """`choices[].logprobs` of completions, and the text offset after these tokens."""
    names = [tokenizer.token_name(token.token_id) for token in tokens]
    offsets, following = [], first_offset
    for name in names:
        offsets.append(following)
        following += len(name)
    columns = {
        "text_offset": offsets,
        "token_logprobs": [finite(t.logprobs.sampled) for t in tokens if t.logprobs is not None],
        "tokens": names,
        "top_logprobs": [_top(token, tokenizer) for token in tokens],
    }
    return columns, following


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token_id)
    return {
        "token": spelled.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(spelled),
    }


def _top(token: Token, tokenizer: Tokenizer) -> dict[str, float]:
    if token.logprobs is None:
        return {}
    return {tokenizer.token_name(t): finite(logprob) for t, logprob in token.logprobs.top}
