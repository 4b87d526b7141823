"""Replies of chats and completions, both as server-sent events and as whole bodies, with the same content.

Parts that are equal in every chunk are formatted once per request; a chunk of text then takes a few string joins. JSON
is written in ASCII: clients that split lines by Unicode's rules would break an event at a raw U+2028. Log-probabilities
come in OpenAI's two forms (an object per token for chats, parallel lists for completions) and, for prompts, in vLLM's
(an object per token). Pure.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from moonserve.gateway.errors import ApiError
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.request import PromptLogprobs, Token

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
        values_by_id = {token_id: (logprob, rank)}
        for place, each in enumerate(ids):
            values_by_id.setdefault(each, (values[place], place + 1))
        entries.append({str(t): _ranked(t, *of_token, tokenizer) for t, of_token in values_by_id.items()})
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
    logprobs = dict(top)
    logprobs.setdefault(token_id, logprob)
    return {tokenizer.token_name(each): finite(value) for each, value in logprobs.items()}


_compact = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHeader:
    """Fields that all chunks of a reply share."""

    id: str
    created: int  # Unix seconds
    model: str

    def opening(self, kind: str) -> str:
        """Returns the beginning of a chunk, up to its choices."""
        name, model = encode_basestring_ascii(self.id), encode_basestring_ascii(self.model)
        return f'data: {{"id":{name},"object":"{kind}","created":{self.created},"model":{model}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Optional parts of the reply that the client requested."""

    usage: bool
    token_ids: bool
    logprobs: bool
    # number of likeliest tokens per token of the echoed prompt; None = not requested
    echoed_logprobs: int | None = None
    prompt_logprobs: int | None = None  # likewise, in vLLM's form
    skip_special_tokens: bool = True


class ReplyFormat(ABC):
    """Format of one reply: as chunks of a stream, in the order of the methods, or as a whole body."""

    @abstractmethod
    def first(self) -> str:
        """Returns the chunks that precede all output."""

    @abstractmethod
    def piece(self, piece: Piece) -> str:
        """Returns a chunk of new output; empty if there is nothing to show."""

    def timing(self, ledgers: Sequence[dict[str, Any]]) -> str:
        """Returns the chunk with `x_timing`, for choices that have ended. Responses cannot request it."""
        raise NotImplementedError

    @abstractmethod
    def usage(self, usage: dict[str, Any]) -> str:
        """Returns the chunk with `choices: []` and the usage."""

    def ending(self) -> bytes:
        """Returns the end of a stream, behind all chunks."""
        return b""

    def failure(self, reply: ApiError) -> bytes:
        """Returns an error event after the start of a stream; nothing follows it."""
        return b"data: " + reply.body() + b"\n\n"

    @abstractmethod
    def whole_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole reply, given one piece per choice."""


@dataclass(eq=False)
class ChoicesFormat(ReplyFormat):
    """Common part of chats and completions. A choice is built as JSON, or by string joins if it is only text."""

    header: ReplyHeader
    options: ReplyOptions
    tokenizer: Tokenizer
    prompt_token_ids: Sequence[Sequence[int]]  # of each choice

    chunk_kind = whole_kind = ""
    text_opening = ""  # between the choice's index and its text
    text_closing = ""

    def __post_init__(self) -> None:
        self._opening = self.header.opening(self.chunk_kind)
        self._closing = ',"usage":null}\n\n' if self.options.usage else "}\n\n"

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """Returns an entry of a chunk's `choices`."""

    @abstractmethod
    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        """Returns an entry of a whole reply's `choices`."""

    def piece(self, piece: Piece) -> str:
        if self.options.token_ids or self.options.logprobs:
            return self._chunk(self.choice(piece))
        if not (piece.text or piece.finish_reason):
            return ""
        text = f"{self.text_opening}{encode_basestring_ascii(piece.text)}{self.text_closing}"
        reason = f'"{piece.finish_reason}"' if piece.finish_reason else "null"
        return (
            f'{self._opening},"choices":[{{"index":{piece.index},{text}'
            f',"logprobs":null,"finish_reason":{reason}}}]{self._closing}'
        )

    def usage(self, usage: dict[str, Any]) -> str:
        return f'{self._opening},"choices":[],"usage":{_compact(self.detailed(usage))}}}\n\n'

    def detailed(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the usage with what the reply's text tells."""
        return usage

    def ending(self) -> bytes:
        return b"data: [DONE]\n\n"

    def timing(self, ledgers: Sequence[dict[str, Any]]) -> str:
        return f'{self._opening},"choices":[],"x_timing":{_compact(ledgers)}{self._closing}'

    def whole_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.header.id,
            "object": self.whole_kind,
            "created": self.header.created,
            "model": self.header.model,
            "choices": [self.whole_choice(piece) for piece in pieces],
            "usage": self.detailed(usage),
        }

    def _chunk(self, choice: dict[str, Any]) -> str:
        return f'{self._opening},"choices":[{_compact(choice)}]{self._closing}'

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        ids = [token.token_id for token in piece.tokens]
        return {"token_ids": ids} if self.options.token_ids else {}

    def _ids_of_prompt(self, index: int) -> dict[str, Any]:
        ids = self.prompt_token_ids[index]
        return {"prompt_token_ids": ids} if self.options.token_ids else {}

    def _of_prompt(self, piece: Piece) -> dict[str, Any]:
        """Returns the requested facts about a choice's prompt for a whole reply."""
        fields, num_top = self._ids_of_prompt(piece.index), self.options.prompt_logprobs
        if num_top is not None:
            ids = self.prompt_token_ids[piece.index]
            fields["prompt_logprobs"] = prompt_logprobs(ids, piece.prompt_logprobs, num_top, self.tokenizer)
        return fields


class ChatFormat(ChoicesFormat):
    """Format of `chat.completion.chunk` and `chat.completion`."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    text_opening = '"delta":{"content":'
    text_closing = "}"

    def first(self) -> str:
        """Returns a chunk with the role of each choice's message."""
        opening = self._opening
        if self.options.token_ids:
            opening += f',"prompt_token_ids":{_compact(self.prompt_token_ids[0])}'
        chunks = ""
        for index in range(len(self.prompt_token_ids)):
            chunks += (
                f'{opening},"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}}'
                f',"logprobs":null,"finish_reason":null}}]{self._closing}'
            )
            opening = self._opening
        return chunks

    def choice(self, piece: Piece) -> dict[str, Any]:
        delta, reason = self._delta(piece)
        logprobs = None
        if self.options.logprobs:
            logprobs = {"content": chat_logprobs(piece.tokens, self.tokenizer)}
        fields = {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {"index": piece.index, **fields, **self._token_ids(piece)}

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        choice = self.choice(piece)
        delta = choice.pop("delta")
        message = {"role": "assistant", **delta, "content": delta.get("content", ""), "refusal": None}
        if calls := delta.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        return {**choice, "message": message}

    def whole_body(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return super().whole_body(pieces, usage) | self._of_prompt(pieces[0])

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """Returns the piece's addition to the message, and the reason why the choice ended."""
        return {"content": piece.text}, piece.finish_reason


@dataclass(eq=False)
class CompletionFormat(ChoicesFormat):
    """Format of `text_completion`, for streams and whole bodies."""

    echoes: Sequence[str]  # text put before each choice's output

    chunk_kind = whole_kind = "text_completion"
    text_opening = '"text":'

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets = [len(echo) for echo in self.echoes]

    def first(self) -> str:
        """Returns the echoed prompts, if requested, and the prompts' token ids. If log-probabilities of an echoed
        prompt are requested, the prompt comes with its choice's first piece instead."""
        if self.options.echoed_logprobs is not None:
            return ""
        return "".join(
            self._chunk(self.choice(Piece(index=index, text=echo, tokens=())) | self._ids_of_prompt(index))
            for index, echo in enumerate(self.echoes)
            if echo or self.options.token_ids
        )

    def choice(self, piece: Piece) -> dict[str, Any]:
        # The prompt is in the same event: the event's id, if any, says that the client has the whole piece.
        if self.options.echoed_logprobs is None or piece.prompt_logprobs is None:
            return self._choice(piece, "")
        return self._choice(piece, self.echoes[piece.index]) | self._ids_of_prompt(piece.index)

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, self.echoes[piece.index]) | self._of_prompt(piece)

    def _choice(self, piece: Piece, echo: str) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": echo + piece.text,
            "logprobs": self._logprobs(piece, echo) if self.options.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._token_ids(piece),
        }

    def _logprobs(self, piece: Piece, echo: str) -> dict[str, Any]:
        index, found, num_top = piece.index, piece.prompt_logprobs, self.options.echoed_logprobs
        columns, self._offsets[index] = completion_logprobs(
            piece.tokens,
            self.tokenizer,
            self._offsets[index],
            skip_special_tokens=self.options.skip_special_tokens,
        )
        if found is None or num_top is None:
            return columns
        ids = self.prompt_token_ids[index]
        echoed = echoed_logprobs(ids, echo, found, num_top, self.tokenizer)
        return {name: [*column, *columns[name]] for name, column in echoed.items()}
