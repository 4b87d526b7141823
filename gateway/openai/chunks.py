"""Replies of chats and completions, both as server-sent events and as whole bodies, with the same content.

Parts that are equal in every chunk are formatted once per request; a chunk of text then takes a few string joins. JSON
is written in ASCII: clients that split lines by Unicode's rules would break an event at a raw U+2028. Pure.
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
    prompt_logprobs,
)
from gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

_compact = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Fields that all chunks of a reply share."""

    id: str
    created: int  # Unix seconds
    model: str

    def opening(self, kind: str) -> str:
        """Returns the beginning of a chunk, up to its choices."""
        name, model = encode_basestring_ascii(self.id), encode_basestring_ascii(self.model)
        return f'data: {{"id":{name},"object":"{kind}","created":{self.created},"model":{model}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """Optional parts of the reply that the client requested."""

    usage: bool
    token_ids: bool
    logprobs: bool
    # number of likeliest tokens per token of the echoed prompt; None = not requested
    echoed_logprobs: int | None = None
    prompt_logprobs: int | None = None  # likewise, in vLLM's form
    skip_special_tokens: bool = True


class Chunks(ABC):
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
        """Returns the end of a stream."""
        return DONE

    def failure(self, reply: ApiError) -> bytes:
        """Returns an error event after the start of a stream; nothing follows it."""
        return b"data: " + reply.body() + b"\n\n"

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the whole reply, given one piece per choice."""


class CompletionLike(Chunks):
    """Common part of chats and completions. A choice is built as JSON, or by string joins if it is only text."""

    chunk_kind = whole_kind = ""
    text_opening = ""  # between the choice's index and its text
    text_closing = ""

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[Sequence[int]],
    ) -> None:
        """`prompt_token_ids`: token ids of each choice's prompt."""
        self._heading = heading
        self._wants = wants
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._opening = heading.opening(self.chunk_kind)
        self._closing = ',"usage":null}\n\n' if wants.usage else "}\n\n"

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """Returns an entry of a chunk's `choices`."""

    @abstractmethod
    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        """Returns an entry of a whole reply's `choices`."""

    def piece(self, piece: Piece) -> str:
        if self._wants.token_ids or self._wants.logprobs:
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
        return f'{self._opening},"choices":[],"usage":{_compact(usage)}}}\n\n'

    def timing(self, ledgers: Sequence[dict[str, Any]]) -> str:
        return f'{self._opening},"choices":[],"x_timing":{_compact(ledgers)}{self._closing}'

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._heading.id,
            "object": self.whole_kind,
            "created": self._heading.created,
            "model": self._heading.model,
            "choices": [self.whole_choice(piece) for piece in pieces],
            "usage": usage,
        }

    def _chunk(self, choice: dict[str, Any]) -> str:
        return f'{self._opening},"choices":[{_compact(choice)}]{self._closing}'

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        ids = [token.token_id for token in piece.tokens]
        return {"token_ids": ids} if self._wants.token_ids else {}

    def _ids_of_prompt(self, index: int) -> dict[str, Any]:
        ids = self._prompt_token_ids[index]
        return {"prompt_token_ids": ids} if self._wants.token_ids else {}

    def _of_prompt(self, piece: Piece) -> dict[str, Any]:
        """Returns the requested facts about a choice's prompt for a whole reply."""
        told, num_top = self._ids_of_prompt(piece.index), self._wants.prompt_logprobs
        if num_top is not None:
            ids = self._prompt_token_ids[piece.index]
            told["prompt_logprobs"] = prompt_logprobs(ids, piece.prompt_logprobs, num_top, self._tokenizer)
        return told


class ChatChunks(CompletionLike):
    """Format of `chat.completion.chunk` and `chat.completion`."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    text_opening = '"delta":{"content":'
    text_closing = "}"

    def first(self) -> str:
        """Returns a chunk with the role of each choice's message."""
        opening = self._opening
        if self._wants.token_ids:
            opening += f',"prompt_token_ids":{_compact(self._prompt_token_ids[0])}'
        chunks = ""
        for index in range(len(self._prompt_token_ids)):
            chunks += (
                f'{opening},"choices":[{{"index":{index},"delta":{{"role":"assistant","content":""}}'
                f',"logprobs":null,"finish_reason":null}}]{self._closing}'
            )
            opening = self._opening
        return chunks

    def choice(self, piece: Piece) -> dict[str, Any]:
        delta, reason = self._delta(piece)
        logprobs = None
        if self._wants.logprobs:
            logprobs = {"content": chat_logprobs(piece.tokens, self._tokenizer)}
        told = {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {"index": piece.index, **told, **self._token_ids(piece)}

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        choice = self.choice(piece)
        delta = choice.pop("delta")
        message = {"role": "assistant", "content": delta.get("content", ""), "refusal": None}
        if calls := delta.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        return {**choice, "message": message}

    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        return super().whole(pieces, usage) | self._of_prompt(pieces[0])

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """Returns the piece's addition to the message, and the reason why the choice ended."""
        return {"content": piece.text}, piece.finish_reason


class CompletionChunks(CompletionLike):
    """Format of `text_completion`, for streams and whole bodies."""

    chunk_kind = whole_kind = "text_completion"
    text_opening = '"text":'

    def __init__(
        self,
        heading: Heading,
        wants: Wants,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        """`echoes`: text put before each choice's output."""
        super().__init__(heading, wants, tokenizer, prompt_token_ids)
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]

    def first(self) -> str:
        """Returns the echoed prompts, if requested, and the prompts' token ids. If log-probabilities of an echoed
        prompt are requested, the prompt comes with its choice's first piece instead."""
        if self._wants.echoed_logprobs is not None:
            return ""
        return "".join(
            self._chunk(self.choice(Piece(index=index, text=echo, tokens=())) | self._ids_of_prompt(index))
            for index, echo in enumerate(self._echoes)
            if echo or self._wants.token_ids
        )

    def choice(self, piece: Piece) -> dict[str, Any]:
        # The prompt is in the same event: the event's id, if any, says that the client has the whole piece.
        if self._wants.echoed_logprobs is None or piece.prompt_logprobs is None:
            return self._choice(piece, "")
        return self._choice(piece, self._echoes[piece.index]) | self._ids_of_prompt(piece.index)

    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, self._echoes[piece.index]) | self._of_prompt(piece)

    def _choice(self, piece: Piece, echo: str) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": echo + piece.text,
            "logprobs": self._logprobs(piece, echo) if self._wants.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._token_ids(piece),
        }

    def _logprobs(self, piece: Piece, echo: str) -> dict[str, Any]:
        index, found, num_top = piece.index, piece.prompt_logprobs, self._wants.echoed_logprobs
        columns, self._offsets[index] = completion_logprobs(
            piece.tokens,
            self._tokenizer,
            self._offsets[index],
            skip_special_tokens=self._wants.skip_special_tokens,
        )
        if found is None or num_top is None:
            return columns
        ids = self._prompt_token_ids[index]
        echoed = echoed_logprobs(ids, echo, found, num_top, self._tokenizer)
        return {name: [*column, *columns[name]] for name, column in echoed.items()}
