"""Requests of a described workload. At each arrival, the thread that is due longest continues, or a new one begins.

So only the arrival process decides when requests come. Think times are lower bounds. Load does not stretch them in the
steady state, since a thread begins only if none is due. The number of waiting threads is bounded; above the limit, new
threads end after their first request.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from traces.format import TOKENS_PER_HASH, TraceRecord
from traces.synthesis.trunks import BlockIds, Chain
from traces.synthesis.workload import Draws, WorkloadSpec, arrival_times, draw_tokens

MAX_WAITING = 200_000  # threads between two requests; about 100 MB


@dataclass(slots=True, eq=False)
class Thread:
    """The state that the next request of a thread builds on."""

    base: Chain  # whole blocks that the next prompt begins with
    base_tokens: int  # of the next prompt, without its new tokens
    grows: bool  # True for a session; otherwise the base is fixed, like a document
    left: int  # remaining requests
    new_tokens: Draws

    def validate(self) -> None:
        """Raises AssertionError unless the base is whole blocks of the next prompt."""
        assert self.left >= 0
        assert len(self.base) * TOKENS_PER_HASH <= self.base_tokens


def requests_of(spec: WorkloadSpec, random: Random) -> Iterator[TraceRecord]:
    """Yields endless records in order of time. `spec` must be checked."""
    threads = _Threads(spec, random)
    for at_s in arrival_times(spec.arrivals, random):
        yield threads.request(at_s)


class _SystemPrompts:
    """Picks system prompts by popularity. Each one is created at its first use."""

    def __init__(self, spec: WorkloadSpec, ids: BlockIds, random: Random) -> None:
        self._spec, self._ids, self._random = spec, ids, random
        weights = (rank**-spec.system_zipf for rank in range(1, spec.system_prompts + 1))
        self._cumulated = list(accumulate(weights))
        self._made: dict[int, tuple[Chain, int]] = {}

    def pick(self) -> tuple[Chain, int]:
        """Returns whole blocks and number of tokens; nothing for a thread without a system prompt."""
        if self._random.random() >= self._spec.system_share:
            return (), 0
        [rank] = self._random.choices(range(len(self._cumulated)), cum_weights=self._cumulated)
        if rank not in self._made:
            tokens = draw_tokens(self._spec.system_tokens, self._random)
            # One token remains for the rest of the prompt.
            tokens = min(tokens, self._spec.max_input_tokens - 1)
            self._made[rank] = self._ids.extend((), tokens // TOKENS_PER_HASH), tokens
        return self._made[rank]


class _Threads:
    """All threads that wait for their next request, by due time."""

    def __init__(self, spec: WorkloadSpec, random: Random) -> None:
        self._spec, self._random = spec, random
        self._ids = BlockIds()
        self._systems = _SystemPrompts(spec, self._ids, random)
        self._waiting: list[tuple[float, int, Thread]] = []  # the number breaks ties
        self._num_waits = 0

    def request(self, at_s: float) -> TraceRecord:
        if self._waiting and self._waiting[0][0] <= at_s:
            thread = heapq.heappop(self._waiting)[2]
            tokens = thread.base_tokens + draw_tokens(thread.new_tokens, self._random)
            if tokens <= self._spec.max_input_tokens:
                thread.left -= 1
                return self._emit(thread, tokens, at_s)
        return self._begin(at_s)

    def _begin(self, at_s: float) -> TraceRecord:
        spec, random = self._spec, self._random
        system, system_tokens = self._systems.pick()
        kind = random.random()
        if kind < spec.session_share:
            later = geometric(spec.turns, random) - 1
            thread = Thread(system, system_tokens, True, later, spec.turn_tokens)
        elif kind < spec.session_share + spec.document_share:
            return self._begin_document(system, system_tokens, at_s)
        else:
            thread = Thread(system, system_tokens, False, 0, spec.input_tokens)
        tokens = system_tokens + draw_tokens(spec.input_tokens, random)
        return self._emit(thread, min(tokens, spec.max_input_tokens), at_s)

    def _begin_document(self, system: Chain, system_tokens: int, at_s: float) -> TraceRecord:
        spec, random = self._spec, self._random
        tokens = system_tokens + draw_tokens(spec.document_tokens, random)
        tokens = min(tokens, spec.max_input_tokens - 1)
        base = self._ids.extend(system, tokens // TOKENS_PER_HASH - len(system))
        later = geometric(spec.questions, random) - 1
        thread = Thread(base, tokens, False, later, spec.question_tokens)
        tokens += draw_tokens(spec.question_tokens, random)
        return self._emit(thread, min(tokens, spec.max_input_tokens), at_s)

    def _emit(self, thread: Thread, tokens: int, at_s: float) -> TraceRecord:
        output = draw_tokens(self._spec.output_tokens, self._random)
        blocks = -(-tokens // TOKENS_PER_HASH)
        chain = self._ids.extend(thread.base, blocks - len(thread.base))
        if thread.grows:
            thread.base = chain[: tokens // TOKENS_PER_HASH]
            thread.base_tokens = tokens + output
        if thread.left and len(self._waiting) < MAX_WAITING:
            due_s = at_s + self._spec.think_s.draw(self._random)
            self._num_waits += 1
            heapq.heappush(self._waiting, (due_s, self._num_waits, thread))
        return TraceRecord(
            arrived_s=at_s,
            input_length=tokens,
            output_length=output,
            hash_ids=chain,
        )


def geometric(mean: float, random: Random) -> int:
    """Draws from a geometric distribution on 1, 2, … with the given mean of at least 1."""
    if mean == 1:
        return 1
    # By inversion, since counting trials takes time proportional to the result.
    return 1 + int(math.log1p(-random.random()) / math.log1p(-1 / mean))
