"""From the generations of one HTTP request to the coroutine that writes its reply.

`Feed` is a bounded, unshared queue: putting never waits, and a reader that stays behind by more than the limit is given
up rather than buffered for. A reader that waits may be handed pieces where they are put, which spares waking it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.generation.attempts import Generation
from gateway.generation.events import Piece, Wish
from protocol.errors import Cancelled, MoonserveError
from protocol.request import Placement
from protocol.tracing import Root

# Enough for any client that reads at all; at 1,000 tokens a second it is 4 s of output.
_MAX_UNREAD_TOKENS = 4096

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


class Answer:
    """All choices of one wish, as the reply's writer reads them."""

    def __init__(self, wish: Wish, root: Root | None) -> None:
        """`root`: the request's span, which the answer ends; None = it is not traced."""
        self._feed = Feed(_MAX_UNREAD_TOKENS)
        self._unfinished = len(wish.choices)
        self._generating = len(wish.choices)
        self._wish = wish
        self.root = root
        self.generations: list[Generation] = []

    async def take(self, handler: Handler | None = None) -> list[Piece]:
        """New output of one or more choices. Raises the error that ended the request. `handler`: as of `Feed.take`."""
        pieces = await self._feed.take(handler)
        self._unfinished -= sum(piece.finish_reason is not None for piece in pieces)
        return pieces

    @property
    def is_complete(self) -> bool:
        """Every choice's last piece has been taken."""
        return self._unfinished == 0

    @property
    def placement(self) -> Placement | None:
        """Placement of the first choice."""
        return self.generations[0].state.placement

    def cancel(self, error: MoonserveError) -> None:
        """Ends what is still under way."""
        for generation in self.generations:
            generation.abort(error)

    def on_piece(self, piece: Piece) -> None:
        self._generating -= piece.finish_reason is not None
        if not self._generating:
            self._end_trace(None)
        if not self._feed.put(piece):
            self.cancel(Cancelled("the client reads too slowly"))

    def on_failure(self, error: MoonserveError) -> None:
        """One failed choice ends the others: a reply is whole or an error."""
        self._end_trace(error)
        self._feed.fail(error)
        self.cancel(error)

    def timing(self) -> list[dict[str, Any]]:
        """The ledger of each choice that has ended well, in their order (docs/tracing.md)."""
        ledgers = ((each.state.index, each.timings.ledger) for each in self.generations)
        return [{"index": i, **found.as_json()} for i, found in ledgers if found is not None]

    def _facts(self) -> dict[str, str | int]:
        """Attributes of the request's span."""
        states = [generation.state for generation in self.generations]
        return {
            "request_id": self._wish.request_id,
            "num_choices": len(states),
            "prompt_tokens": sum(len(state.prompt) for state in states),
            "output_tokens": sum(len(state.generated) for state in states),
            "cached_tokens": sum(state.cached_tokens for state in states),
        }

    def _end_trace(self, error: MoonserveError | None) -> None:
        root, self.root = self.root, None
        if root is not None:
            root.end(None if error is None else error.code, **self._facts())
