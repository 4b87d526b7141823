"""Replies of chats and completions, as server-sent events and as whole bodies, which say the same.

All that is the same in every chunk is formatted once per request; a chunk of text is then a few string joins.
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
    prompt_logprobs,
)
from gateway.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

_compact = json.JSONEncoder(separators=(",", ":")).encode


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
    echoed_logprobs: int | None = None  # likeliest of each token of the echoed prompt; None = nothing of it
    prompt_logprobs: int | None = None  # likewise, in vLLM's form
    skip_special_tokens: bool = True


class Chunks(ABC):
    """One reply in its form: the chunks of a stream, in the order of the methods, or a whole body."""

    @abstractmethod
    def first(self) -> str:
        """What comes before any output."""

    @abstractmethod
    def piece(self, piece: Piece) -> str:
        """A chunk for new output; empty when there is nothing to show."""

    def timing(self, ledgers: Sequence[dict[str, Any]]) -> str:
        """The chunk with `x_timing`, for choices that have ended. Responses have none: their body cannot ask for it."""
        raise NotImplementedError

    @abstractmethod
    def usage(self, usage: dict[str, Any]) -> str:
        """The chunk with `choices: []`."""

    def ending(self) -> bytes:
        """What comes after all output."""
        return DONE

    def failure(self, reply: ApiError) -> bytes:
        """An error after the first byte of a stream; nothing comes after it."""
        return b"data: " + reply.body() + b"\n\n"

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """The reply that is not streamed, of one piece per choice."""


class CompletionLike(Chunks):
    """What chat and completions share: a choice as JSON, and by hand where it is nothing but text."""

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
        """`prompt_token_ids`: of each choice's prompt."""
        self._heading = heading
        self._wants = wants
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._opening = heading.opening(self.chunk_kind)
        self._closing = ',"usage":null}\n\n' if wants.usage else "}\n\n"

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """An entry of a chunk's `choices`."""

    @abstractmethod
    def whole_choice(self, piece: Piece) -> dict[str, Any]:
        """An entry of a whole reply's `choices`."""

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
        """What a client wants to see of a choice's prompt in a whole reply."""
        told, num_top = self._ids_of_prompt(piece.index), self._wants.prompt_logprobs
        if num_top is not None:
            ids = self._prompt_token_ids[piece.index]
            told["prompt_logprobs"] = prompt_logprobs(ids, piece.prompt_logprobs, num_top, self._tokenizer)
        return told


class ChatChunks(CompletionLike):
    """`chat.completion.chunk` and `chat.completion`."""

    chunk_kind = "chat.completion.chunk"
    whole_kind = "chat.completion"
    text_opening = '"delta":{"content":'
    text_closing = "}"

    def first(self) -> str:
        """The role of each choice's message."""
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
        """What the piece adds to the message, and why the choice ended."""
        return {"content": piece.text}, piece.finish_reason


class CompletionChunks(CompletionLike):
    """`text_completion`, of which streams have no further form."""

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
        """The echoed prompts, if they were asked for, and the prompts' token ids. What is known of a prompt's tokens
        comes with its choice's first piece, and so does the prompt then."""
        if self._wants.echoed_logprobs is not None:
            return ""
        return "".join(
            self._chunk(self.choice(Piece(index=index, text=echo, tokens=())) | self._ids_of_prompt(index))
            for index, echo in enumerate(self._echoes)
            if echo or self._wants.token_ids
        )

    def choice(self, piece: Piece) -> dict[str, Any]:
        # One event with the prompt: its id, where it has one, says that the client has all of the piece.
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
