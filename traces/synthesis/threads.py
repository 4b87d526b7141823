"""Requests of a described workload: at each arrival the thread that has waited longest goes on, else a new one begins.

So the arrival process alone decides when requests come, and think times are lower bounds that load does not stretch in
the steady state, since a thread begins only when nobody waits. Threads that wait are bounded; above that, new ones end
after their first request.
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

MAX_WAITING = 200_000  # threads between two of their requests; about 100 MB


@dataclass(slots=True, eq=False)
class Thread:
    """What the next request of a thread builds on."""

    base: Chain  # whole blocks that the next prompt begins with
    base_tokens: int  # of the next prompt, its new tokens not counted
    grows: bool  # a session; otherwise the base stays, as a document does
    left: int  # requests after the last one
    new_tokens: Draws

    def validate(self) -> None:
        """Raises AssertionError unless the base is whole blocks of the next prompt."""
        assert self.left >= 0
        assert len(self.base) * TOKENS_PER_HASH <= self.base_tokens


def requests_of(spec: WorkloadSpec, random: Random) -> Iterator[TraceRecord]:
    """Records in the order of time, without end. `spec` has been checked."""
    threads = _Threads(spec, random)
    for at_s in arrival_times(spec.arrivals, random):
        yield threads.request(at_s)


class _SystemPrompts:
    """Picks a system prompt by popularity; it is there from its first use on."""

    def __init__(self, spec: WorkloadSpec, ids: BlockIds, random: Random) -> None:
        self._spec, self._ids, self._random = spec, ids, random
        weights = (rank**-spec.system_zipf for rank in range(1, spec.system_prompts + 1))
        self._cumulated = list(accumulate(weights))
        self._made: dict[int, tuple[Chain, int]] = {}

    def pick(self) -> tuple[Chain, int]:
        """Whole blocks, all tokens. Nothing for threads without a system prompt."""
        if self._random.random() >= self._spec.system_share:
            return (), 0
        [rank] = self._random.choices(range(len(self._cumulated)), cum_weights=self._cumulated)
        if rank not in self._made:
            tokens = draw_tokens(self._spec.system_tokens, self._random)
            # One token is left for the rest of the prompt.
            tokens = min(tokens, self._spec.max_input_tokens - 1)
            self._made[rank] = self._ids.extend((), tokens // TOKENS_PER_HASH), tokens
        return self._made[rank]


class _Threads:
    """All threads that wait for their next request, by the time when it is due."""

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
    """A number from 1 up: after each one it goes on with the same probability. `mean` is 1 or more."""
    if mean == 1:
        return 1
    # By inversion, since counting up takes as long as the number is large.
    return 1 + int(math.log1p(-random.random()) / math.log1p(-1 / mean))
