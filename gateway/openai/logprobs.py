"""Log-probabilities in OpenAI's two forms and, for prompts, also in vLLM's form.

Chats have an object per token and completions have parallel lists; vLLM's form has an object per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.text.tokenizer import Tokenizer
from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import Token

# JSON has no -inf; vLLM and OpenAI send this number instead.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns `choices[].logprobs.content` of chat completions."""
    return [
        {
            **_entry(token.token_id, token.logprobs.sampled, tokenizer),
            "top_logprobs": [_entry(token_id, logprob, tokenizer) for token_id, logprob in token.logprobs.top],
        }
        for token in tokens
        if token.logprobs is not None
    ]


def completion_logprobs(
    tokens: Sequence[Token], tokenizer: Tokenizer, first_offset: int, *, skip_special_tokens: bool
) -> tuple[dict[str, Any], int]:
    """Returns `choices[].logprobs` of completions, and the text offset after these tokens in characters."""
    offsets, following = [], first_offset
    for token in tokens:
        offsets.append(following)
        following += tokenizer.token_width(token.token_id, skip_special_tokens=skip_special_tokens)
    columns = {
        "text_offset": offsets,
        "token_logprobs": [finite(t.logprobs.sampled) for t in tokens if t.logprobs is not None],
        "tokens": [tokenizer.token_name(token.token_id) for token in tokens],
        "top_logprobs": [_top(token, tokenizer) for token in tokens],
    }
    return columns, following


def echoed_logprobs(
    token_ids: Sequence[int], text: str, found: PromptLogprobs, num_top: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a prompt echoed as `text`. The first token has no predecessor: null."""
    names = [tokenizer.token_name(token_id) for token_id in token_ids]
    own = found.logprobs.tolist()
    top = zip(found.top_ids[:, :num_top].tolist(), found.top_logprobs[:, :num_top].tolist(), strict=True)
    likeliest = [
        _likeliest(zip(ids, values, strict=True), token_id, logprob, tokenizer)
        for token_id, logprob, (ids, values) in zip(token_ids[1:], own, top, strict=True)
    ]
    return {
        "text_offset": _offsets_in(text, token_ids, tokenizer),
        "token_logprobs": [None, *map(finite, own)],
        "tokens": names,
        "top_logprobs": [None, *likeliest],
    }


def _offsets_in(text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the offset of each token in the text. A special token has a width only where the text contains it, not
    where the tokenizer added it."""
    offsets, following = [], 0
    for token_id in token_ids:
        offsets.append(following)
        written = text.startswith(tokenizer.token_name(token_id), following)
        following += tokenizer.token_width(token_id, skip_special_tokens=not written)
    return offsets


def prompt_logprobs(
    token_ids: Sequence[int], found: PromptLogprobs | None, num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """Returns vLLM's `prompt_logprobs`: null for the first token, then an object by token id with the prompt's own
    token and the likeliest ones. None if nothing was found."""
    if found is None:
        return None
    entries: list[dict[str, Any] | None] = [None]
    columns = (found.logprobs, found.ranks, found.top_ids[:, :num_top], found.top_logprobs)
    rows = zip(token_ids[1:], *(column.tolist() for column in columns), strict=True)
    for token_id, logprob, rank, ids, values in rows:
        told = {token_id: (logprob, rank)}
        for place, each in enumerate(ids):
            told.setdefault(each, (values[place], place + 1))
        entries.append({str(t): _ranked(t, *of_token, tokenizer) for t, of_token in told.items()})
    return entries


def _ranked(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": tokenizer.token_name(token_id),
    }


def finite(logprob: float) -> float:
    """Returns the number, or a finite substitute that JSON can hold."""
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
    return _likeliest(token.logprobs.top, token.token_id, token.logprobs.sampled, tokenizer)


def _likeliest(
    top: Iterable[tuple[int, float]], token_id: int, logprob: float, tokenizer: Tokenizer
) -> dict[str, float]:
    """Returns the likeliest tokens and, like OpenAI, the token itself if it is not among them."""
    told = dict(top)
    told.setdefault(token_id, logprob)
    return {tokenizer.token_name(each): finite(value) for each, value in told.items()}
