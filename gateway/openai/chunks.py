"""Server-sent events of streamed replies, formatted by hand.

All that is the same in every chunk of a choice is formatted once per request; a chunk is then a few string joins.
JSON is written in ASCII: clients that split lines as Unicode does would break an event at a raw U+2028. Pure.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.generation.events import Piece
from gateway.http.errors import ApiError
from gateway.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
)
from gateway.text.tokenizer import Tokenizer
from protocol.request import Token

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a reply's chunks have in common."""

    id: str
    created: int  # Unix seconds
    model: str

    def opening(self, kind: str) -> str:
        """A chunk up to its choices."""
        name, model = encode_basestring_ascii(self.id), encode_basestring_ascii(self.model)
        return f'data: {{"id":{name},"object":"{kind}","created":{self.created},"model":{model}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What the client asked to see."""

    usage: bool
    token_ids: bool
    logprobs: bool
    echoed_logprobs: int | None = (
        None  # likeliest of each token of the echoed prompt; None = nothing of it
    )
    prompt_logprobs: int | None = None  # likewise, in vLLM's form
    skip_special_tokens: bool = True


class Chunks(ABC):
    """The chunks of one streamed reply, in the order of the methods."""

    @abstractmethod
    def first(self) -> str:
        """What comes before any output."""

    @abstractmethod
    def piece(self, piece: Piece) -> str:
        """A chunk for new output; empty when there is nothing to show."""

    @abstractmethod
    def usage(self, usage: dict[str, Any]) -> str:
        """The chunk with `choices: []`."""

    def ending(self) -> bytes:
        """What comes after all output."""
        return DONE

    def failure(self, reply: ApiError) -> bytes:
        """An error after the first byte of a stream; nothing comes after it."""
        return b"data: " + reply.body() + b"\n\n"


class CompletionLike(Chunks):
    """What chat and completions share."""

    kind = ""
    text_opening = ""  # between the choice's index and its text
    text_closing = ""

    def __init__(self, heading: Heading, wants: Wants, tokenizer: Tokenizer) -> None:
        self._wants = wants
        self._tokenizer = tokenizer
        self._opening = heading.opening(self.kind)
        self._closing = ',"usage":null}\n\n' if wants.usage else "}\n\n"

    def piece(self, piece: Piece) -> str:
        wants = self._wants
        if not (piece.text or piece.finish_reason or wants.token_ids or wants.logprobs):
            return ""
        return self._chunk(piece.index, piece.text, piece.tokens, piece.finish_reason)

    def usage(self, usage: dict[str, Any]) -> str:
        return f'{self._opening},"choices":[],"usage":{_compact(usage)}}}\n\n'

    def timing(self, ledgers: Sequence[dict[str, Any]]) -> str:
        """The chunk with `x_timing`, of choices that have ended."""
        return f'{self._opening},"choices":[],"x_timing":{_compact(ledgers)}{self._closing}'

    def _chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[Token],
        finish_reason: str | None,
        extra: str = "",
    ) -> str:
        output = f"{self.text_opening}{encode_basestring_ascii(text)}{self.text_closing}"
        return self._around(index, output, tokens, finish_reason, extra)

    def _around(
        self,
        index: int,
        output: str,
        tokens: Sequence[Token],
        finish_reason: str | None,
        extra: str = "",
        columns: dict[str, Any] | None = None,
    ) -> str:
        """The chunk with these fields of the choice, as JSON, for its output. `columns`: its log-probabilities, where
        they are not those of the tokens."""
        logprobs = "null"
        if self._wants.logprobs:
            logprobs = _compact(columns or self._logprobs(index, tokens))
        reason = f'"{finish_reason}"' if finish_reason else "null"
        if self._wants.token_ids:
            ids = ",".join(str(token.token_id) for token in tokens)
            extra += f',"token_ids":[{ids}]'
        return (
            f'{self._opening},"choices":[{{"index":{index},{output}'
            f',"logprobs":{logprobs},"finish_reason":{reason}{extra}}}]{self._closing}'
        )

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        """In the form of this kind of reply."""


class ChatChunks(CompletionLike):
    """`chat.completion.chunk`."""

    kind = "chat.completion.chunk"
    text_opening = '"delta":{"content":'
    text_closing = "}"

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        prompt_token_ids: Sequence[int],
    ) -> None:
        super().__init__(heading, wants, tokenizer)
        self._num_choices = num_choices
        self._prompt_token_ids = prompt_token_ids

    def first(self) -> str:
        """The role of each choice's message."""
        ids = ""
        if self._wants.token_ids:
            ids = f',"prompt_token_ids":{_compact(list(self._prompt_token_ids))}'
        return "".join(
            f'{self._opening}{ids if index == 0 else ""},"choices":[{{"index":{index},"delta":'
            '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            f"{self._closing}"
            for index in range(self._num_choices)
        )

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": chat_logprobs(tokens, self._tokenizer)}


class CompletionChunks(CompletionLike):
    """`text_completion`, of which streams have no further form."""

    kind = "text_completion"
    text_opening = '"text":'

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        """One entry of `prompt_token_ids` and `echoes` (text put before the output) per choice."""
        super().__init__(heading, wants, tokenizer)
        self._prompt_token_ids = prompt_token_ids
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]

    def first(self) -> str:
        """The echoed prompts, if they were asked for, and the prompts' token ids. What is known of a prompt's tokens
        comes with its choice's first piece, and so does the prompt then."""
        if self._wants.echoed_logprobs is not None:
            return ""
        return "".join(
            self._chunk(index, echo, (), None, self._ids(index))
            for index, echo in enumerate(self._echoes)
            if echo or self._wants.token_ids
        )

    def piece(self, piece: Piece) -> str:
        num_top, found = self._wants.echoed_logprobs, piece.prompt_logprobs
        if num_top is None or found is None:
            return super().piece(piece)
        index = piece.index
        echo, ids = self._echoes[index], self._prompt_token_ids[index]
        # One event: its id, where it has one, says that the client has all of the piece.
        columns = joined(
            echoed_logprobs(ids, echo, found, num_top, self._tokenizer),
            self._logprobs(index, piece.tokens),
        )
        text = f"{self.text_opening}{encode_basestring_ascii(echo + piece.text)}"
        return self._around(
            index, text, piece.tokens, piece.finish_reason, self._ids(index), columns
        )

    def _ids(self, index: int) -> str:
        """Of the prompt, where they are wanted."""
        if not self._wants.token_ids:
            return ""
        return f',"prompt_token_ids":{_compact(list(self._prompt_token_ids[index]))}'

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        columns, self._offsets[index] = completion_logprobs(
            tokens,
            self._tokenizer,
            self._offsets[index],
            skip_special_tokens=self._wants.skip_special_tokens,
        )
        return columns


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
