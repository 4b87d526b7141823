"""Path of output from the generations of one HTTP request to the coroutine that writes its reply.

`OutputQueue` is a bounded queue with one reader. Putting never waits. A reader that falls behind by more than the limit
is cancelled; its output is not buffered further. A waiting reader may process pieces at the moment they are put, which
avoids waking it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from moonserve.gateway.cluster.request_metrics import RequestMetrics
from moonserve.gateway.generation.events import GenerationRequest, Piece
from moonserve.gateway.generation.request_runner import Generation
from moonserve.protocol.errors import Cancelled, MoonserveError
from moonserve.protocol.process.tracing import RequestSpan
from moonserve.protocol.request import Placement

# Enough for any client that reads at all; at 1,000 tokens a second this is 4 s of output.
_MAX_UNREAD_TOKENS = 4096

Handler = Callable[[Piece], bool]
"""Processes a piece immediately. Returns False if it did nothing and the piece has to be queued."""


class OutputQueue:
    """Bounded queue of pieces that the reader has not taken yet."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._pieces: list[Piece] = []
        self._error: Exception | None = None
        self._filled = asyncio.Event()
        self._handler: Handler | None = None  # set while the reader waits and the queue is empty

    def put(self, piece: Piece) -> bool:
        """Passes a piece to the waiting handler or queues it. Returns False if the reader has fallen too far behind."""
        if self._handler is not None and piece.finish_reason is None and self._handler(piece):
            return True
        self._handler = None  # later pieces must not overtake this one
        self._pieces.append(piece)
        self._num_tokens += len(piece.tokens)
        self._filled.set()
        return self._num_tokens <= self._max_tokens

    def fail(self, error: Exception) -> None:
        """Makes the reader raise `error` instead of receiving unread pieces. The first error counts."""
        self._error = self._error or error
        self._handler = None
        self._filled.set()

    async def take(self, handler: Handler | None = None) -> list[Piece]:
        """Waits for at least one piece and returns all queued pieces, joined per choice. While this call waits,
        `handler` receives pieces as they are put, except the last piece of a choice."""
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
        return join_pieces(pieces) if len(pieces) > 1 else pieces


def join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Joins pieces into one per choice, and one for the part that the client already has. A reader that lags receives
    larger pieces, not more of them."""
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
    """Output of all choices of one request, as the reply's writer reads it."""

    def __init__(self, request: GenerationRequest, root: RequestSpan | None, metrics: RequestMetrics) -> None:
        """`root`: the request's span, which the answer ends; None if the request is not traced."""
        self._queue = OutputQueue(_MAX_UNREAD_TOKENS)
        self._num_unread = len(request.choices)
        self._num_generating = len(request.choices)
        self._request = request
        self.root = root
        self._metrics = metrics
        self.generations: list[Generation] = []

    async def take(self, handler: Handler | None = None) -> list[Piece]:
        """Returns new output of one or more choices. Raises the error that ended the request. `handler`: see
        `OutputQueue.take`."""
        pieces = await self._queue.take(handler)
        self._num_unread -= sum(piece.finish_reason is not None for piece in pieces)
        return pieces

    @property
    def is_complete(self) -> bool:
        """True if the last piece of every choice has been taken."""
        return self._num_unread == 0

    @property
    def placement(self) -> Placement | None:
        """Placement of the first choice."""
        return self.generations[0].state.placement

    def cancel(self, error: MoonserveError) -> None:
        """Ends all generations that are still running."""
        for generation in self.generations:
            generation.abort(error)

    def on_piece(self, piece: Piece) -> None:
        self._num_generating -= piece.finish_reason is not None
        if not self._num_generating:
            longest = max(len(generation.state.generated) for generation in self.generations)
            self._metrics.longest_generation.add(longest)
            self._end_trace(None)
        if not self._queue.put(piece):
            self.cancel(Cancelled("the client reads too slowly"))

    def on_failure(self, error: MoonserveError) -> None:
        """Ends all choices when one has failed: a reply is either complete or an error."""
        self._end_trace(error)
        self._queue.fail(error)
        self.cancel(error)

    def timing(self) -> list[dict[str, Any]]:
        """Returns the phase times of each choice that ended well, in order of the choices (docs/tracing.md)."""
        times = ((each.state.index, each.timings.phase_times) for each in self.generations)
        return [{"index": i, **found.as_json()} for i, found in times if found is not None]

    def _span_attributes(self) -> dict[str, str | int | float]:
        """Returns the attributes of the request's span, by OpenTelemetry's names of generative AI and vLLM's of
        latencies."""
        states = [generation.state for generation in self.generations]
        sampling = self._request.choices[0].sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": self._request.request_id,
            "gen_ai.request.model": self._request.model,
            "gen_ai.request.choice.count": len(states),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.input_tokens": sum(len(state.prompt) for state in states),
            "gen_ai.usage.output_tokens": sum(len(state.generated) for state in states),
            "gen_ai.usage.cache_read.input_tokens": sum(state.cached_tokens for state in states),
        }
        if (found := self.generations[0].timings.phase_times) is not None:
            attributes |= {"gen_ai.latency.time_to_first_token": found.ttft_s, "gen_ai.latency.e2e": found.e2e_s}
        return attributes

    def _end_trace(self, error: MoonserveError | None) -> None:
        root, self.root = self.root, None
        if root is not None:
            root.end(None if error is None else error.code, **self._span_attributes())
