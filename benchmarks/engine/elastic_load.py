"""Bursts that alternate between models, and the loop that serves them: continuous batching over real engines.

One thread and one core serve all models, one step of each in turn. Time is the CPU time of the process (background
threads included) plus the gaps in which nothing is to do, which are skipped; so other processes of the machine count as
little as they can. A request is admitted when its prompt and its whole output have blocks, first come, first served, as
`engine.generate` does; nothing is preempted.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from engine.batch import Sampled, Slice
from engine.block_pool import BlockPool
from engine.engine import Engine
from protocol.ids import BlockId, RequestId
from protocol.request import SamplingParams
from protocol.timeline import Timeline

CHUNK_TOKENS = 512  # of prompts in one step, as workers' --max-num-batched-tokens
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Each model in turn gets a burst of requests, and all get a few in between. Lengths are uniform."""

    num_models: int = 3
    num_bursts: int = 3
    period_s: float = 8.0  # between bursts; long enough for all ways to have served the last one
    burst_requests: int = 40
    burst_s: float = 0.5  # mean span of a burst's arrivals
    trickle_s: float = 1.0  # mean gap between other requests, over all models
    prompt_tokens: tuple[int, int] = (64, 192)
    output_tokens: tuple[int, int] = (128, 384)

    def arrivals(self, seed: int, vocab_size: int) -> list[Arrival]:
        """In the order of their instants."""
        rng = random.Random(seed)
        made: list[tuple[float, int]] = []
        for burst in range(self.num_bursts):
            at_s = burst * self.period_s
            for _ in range(self.burst_requests):
                at_s += rng.expovariate(self.burst_requests / self.burst_s)
                made.append((at_s, burst % self.num_models))
        at_s = rng.expovariate(1 / self.trickle_s)
        while at_s < self.num_bursts * self.period_s:
            made.append((at_s, rng.randrange(self.num_models)))
            at_s += rng.expovariate(1 / self.trickle_s)
        return [
            Arrival(
                at_s=at_s,
                model=model,
                prompt=[
                    rng.randrange(16, vocab_size) for _ in range(rng.randint(*self.prompt_tokens))
                ],
                num_output=rng.randint(*self.output_tokens),
            )
            for at_s, model in sorted(made)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at_s: float
    model: int
    prompt: list[int]
    num_output: int


class Clock:
    """CPU seconds of this process since it was made, plus what was skipped, less what was not to count."""

    def __init__(self) -> None:
        self._shift = -time.process_time()

    def now(self) -> float:
        return time.process_time() + self._shift

    def skip_to(self, at_s: float) -> None:
        self._shift += max(0.0, at_s - self.now())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.process_time()
        yield
        self._shift -= time.process_time() - began


class Blocks(Protocol):
    """Where a model's blocks come from; an `ElasticModel` is one."""

    def allocate(self, count: int) -> list[BlockId] | None: ...
    def free(self, blocks: list[BlockId]) -> None: ...
    def want(self, count: int) -> None: ...


class StaticBlocks:
    """A part of the memory for one model alone."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(
            num_blocks,
            on_added=lambda _key, _parent: None,
            on_removed=lambda _key: None,
            enable_prefix_caching=False,
        )

    def allocate(self, count: int) -> list[BlockId] | None:
        return self._pool.allocate(count)

    def free(self, blocks: list[BlockId]) -> None:
        self._pool.release(blocks)

    def want(self, count: int) -> None:
        """Nobody else could give it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    request_id: RequestId
    arrival: Arrival
    tokens: list[int]
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    token_at: list[float] = field(default_factory=list)


class Replica:
    """One model: its engine, its queue, its batch."""

    def __init__(self, engine: Engine, blocks: Blocks) -> None:
        self.engine = engine
        self._blocks = blocks
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self.finished: list[Timeline] = []
        self.largest_batch = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, arrival: Arrival, number: int) -> None:
        self._waiting.append(
            _Sequence(
                request_id=RequestId(f"request-{number}"),
                arrival=arrival,
                tokens=list(arrival.prompt),
            )
        )

    def step(self, clock: Clock) -> bool:
        """Whether anything was computed."""
        self._admit()
        slices = self._slices()
        if not slices:
            return False
        by_id = {sequence.request_id: sequence for sequence in self._running}
        for piece, sampled in zip(slices, self.engine.execute(slices), strict=True):
            self._advance(by_id[piece.request_id], piece, sampled, clock.now())
        self._running = [s for s in self._running if len(s.token_at) < s.arrival.num_output]
        return True

    def _admit(self) -> None:
        while self._waiting:
            head = self._waiting[0]
            tokens = len(head.arrival.prompt) + head.arrival.num_output
            needed = self.engine.layout.blocks_for(tokens)
            blocks = self._blocks.allocate(needed)
            if blocks is None:
                self._blocks.want(needed)
                break
            head.blocks = blocks
            self._running.append(self._waiting.popleft())
        self.largest_batch = max(self.largest_batch, len(self._running))

    def _slices(self) -> list[Slice]:
        slices: list[Slice] = []
        budget = CHUNK_TOKENS
        for sequence in self._running:
            length = end = len(sequence.tokens)
            if sequence.num_computed < length - 1:
                end = min(length, sequence.num_computed + budget)
                budget -= end - sequence.num_computed
            if end > sequence.num_computed:
                slices.append(_slice(sequence, end))
        return slices

    def _advance(
        self, sequence: _Sequence, piece: Slice, sampled: Sampled | None, now: float
    ) -> None:
        sequence.num_computed = piece.end
        if sampled is None:
            return
        sequence.tokens.append(sampled.token_id)
        sequence.token_at.append(now)
        if len(sequence.token_at) == sequence.arrival.num_output:
            self._blocks.free(sequence.blocks)
            self.finished.append(Timeline(sequence.arrival.at_s, tuple(sequence.token_at)))


def _slice(sequence: _Sequence, end: int) -> Slice:
    return Slice(
        request_id=sequence.request_id,
        token_ids=sequence.tokens,
        start=sequence.num_computed,
        end=end,
        block_table=sequence.blocks,
        sampling=_GREEDY,
        num_prompt_tokens=len(sequence.arrival.prompt),
        samples=end == len(sequence.tokens),
    )


def serve(
    replicas: Sequence[Replica],
    arrivals: Sequence[Arrival],
    clock: Clock,
    after_round: Callable[[], None],
) -> list[Timeline]:
    """Serves all arrivals; `after_round` is called after each turn over the replicas. Raises RuntimeError when none of
    those that wait can ever be admitted."""
    coming = deque(enumerate(arrivals))
    while coming or any(replica.is_busy for replica in replicas):
        while coming and coming[0][1].at_s <= clock.now():
            number, arrival = coming.popleft()
            replicas[arrival.model].add(arrival, number)
        computed = [replica.step(clock) for replica in replicas]
        after_round()
        if not any(computed):
            if not coming:
                raise RuntimeError("requests wait and nothing runs: the memory is too small")
            clock.skip_to(coming[0][1].at_s)
    return [timeline for replica in replicas for timeline in replica.finished]
