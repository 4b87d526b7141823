"""From the generations of one HTTP request to the coroutine that writes its reply: a bounded, unshared queue.

Putting never waits. A reader that stays behind by more than the limit is given up rather than buffered for. A reader
that waits may be handed pieces where they are put, which spares waking it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import FinishReason, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of one choice."""

    index: int  # of the choice
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with its first piece, where they are wanted
    is_known: bool = False  # the client has it, from an earlier connection


Handler = Callable[[Piece], bool]
"""Deals with a piece at once; False: it did nothing, and the piece has to wait."""


class Feed:
    """The pieces that the reader has not taken yet."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pieces: list[Piece] = []
        self._error: Exception | None = None
        self._filled = asyncio.Event()
        self._handler: Handler | None = None  # while the reader waits and nothing else does

    def put(self, piece: Piece) -> bool:
        """False when the reader is too far behind to go on."""
        if self._handler is not None and piece.finish_reason is None and self._handler(piece):
            return True
        self._handler = None  # what comes later must not overtake this one
        self._pieces.append(piece)
        self._num_tokens += len(piece.tokens)
        self._filled.set()
        return self._num_tokens <= self._max_tokens

    def fail(self, error: Exception) -> None:
        """The reader gets `error` instead of what it has not read; the first one counts."""
        self._error = self._error or error
        self._handler = None
        self._filled.set()

    async def take(self, handler: Handler | None = None) -> list[Piece]:
        """Everything that waits, at least one piece; pieces of one choice are joined. `handler`: gets what comes before
        that, but for last pieces of choices."""
        if not self._filled.is_set():
            self._handler = handler
            try:
                await self._filled.wait()
            finally:
                self._handler = None
        if self._error is not None:
            raise self._error
        pieces, self._pieces, self._num_tokens = self._pieces, [], 0
        self._filled.clear()
        return joined(pieces) if len(pieces) > 1 else pieces


def joined(pieces: list[Piece]) -> list[Piece]:
    """One piece per choice, and one of what its client has already: a reader that lags gets larger pieces, not more."""
    by_choice: dict[tuple[int, bool], list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault((piece.index, piece.is_known), []).append(piece)
    return [_join(parts) for parts in by_choice.values()]


def _join(parts: list[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    return Piece(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        finish_reason=parts[-1].finish_reason,
        prompt_logprobs=parts[0].prompt_logprobs,
        is_known=parts[0].is_known,
    )
