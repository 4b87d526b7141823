"""Log-probabilities in OpenAI's two forms: per-token objects for chat, parallel lists for completions; of prompts also
in vLLM's, an object per token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.text.tokenizer import Tokenizer
from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import Token

# JSON has no -inf; vLLM and OpenAI send this in its place.
_IMPOSSIBLE = -9999.0


def chat_logprobs(tokens: Iterable[Token], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of chat completions."""
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
    """`choices[].logprobs` of completions, and the text offset after these tokens, in characters."""
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
    """`choices[].logprobs` of a prompt echoed as `text`. Its first token follows nothing: null."""
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
    """Where each token begins. A special one is in the text where somebody wrote it, and not where the tokenizer
    put it before what was written."""
    offsets, following = [], 0
    for token_id in token_ids:
        offsets.append(following)
        written = text.startswith(tokenizer.token_name(token_id), following)
        following += tokenizer.token_width(token_id, skip_special_tokens=not written)
    return offsets


def prompt_logprobs(
    token_ids: Sequence[int], found: PromptLogprobs | None, num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM has it: null for the first token, then by token id what is told of the prompt's own
    and of the likeliest. None where nothing was found."""
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
    return _likeliest(token.logprobs.top, token.token_id, token.logprobs.sampled, tokenizer)


def _likeliest(
    top: Iterable[tuple[int, float]], token_id: int, logprob: float, tokenizer: Tokenizer
) -> dict[str, float]:
    """As OpenAI has it: the token itself is told of, too, where it is not among the likeliest."""
    told = dict(top)
    told.setdefault(token_id, logprob)
    return {tokenizer.token_name(each): finite(value) for each, value in told.items()}
