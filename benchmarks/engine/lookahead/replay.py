"""A decode worker in virtual time, over any allocator: continuous batching, as `decode_worker.schedule` does it.

Prompts come with their KV (the prefill worker's work is not seen here) and wait, first come first served, until the
allocator admits them. A preempted sequence goes before all who were never admitted and computes its tokens again, in
chunks beside the decoding ones. Steps take what the profiles say. Between events (an end, a table that is full, an
arrival, a new look at the queue) all sequences get a token a step, so that a run of steps is an arithmetic series.
Does not know how long a request will be before it ends; the sequences do.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.engine.lookahead.load import Wish
from engine.lookahead.allocator import Allocator
from protocol.ids import RequestId
from protocol.profile import DecodeProfile, PrefillProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What is simulated."""

    decode: DecodeProfile
    prefill: PrefillProfile
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 2048


class Clock:
    """Steps so far; decoding sequences read their lengths from it."""

    __slots__ = ("now_s", "step")

    def __init__(self) -> None:
        self.step = 0
        self.now_s = 0.0


class Sequence:
    """One request. While it decodes it has a token more with every step of the clock."""

    __slots__ = (
        "_clock", "arrived_s", "base", "base_step", "blocks", "first_wait_s", "max_tokens", "missing",
        "num_prompt_tokens", "output", "rank", "request_id", "tenant", "turn", "waited_s", "waits_since_s",
    )  # fmt: skip
    model = ""

    def __init__(self, wish: Wish, number: int, clock: Clock) -> None:
        self.request_id = RequestId(str(number))
        self.rank = (0, number)
        self.tenant = wish.tenant
        self.num_prompt_tokens = wish.prompt
        self.max_tokens = wish.limit
        self.output = wish.output
        self.arrived_s = self.waits_since_s = wish.arrived_s
        self.waited_s = 0.0
        self.first_wait_s: float | None = None
        self.base = wish.prompt + 1  # tokens at base_step
        self.base_step: int | None = None  # None: it does not decode
        self.missing = 0  # tokens to compute again
        self.turn = 0  # of its event in the heap; older ones are void
        self.blocks: list[int] = []
        self._clock = clock

    @property
    def num_tokens(self) -> int:
        if self.base_step is None:
            return self.base
        return self.base + self._clock.step - self.base_step

    @property
    def is_done(self) -> bool:
        return self.num_tokens - self.num_prompt_tokens >= self.output

    def decode_on(self) -> None:
        self.base_step = self._clock.step

    def pause(self) -> None:
        self.base, self.base_step = self.num_tokens, None


@dataclass(slots=True)
class Sums:
    """Integrals over time, of seconds in which somebody runs."""

    busy_s: float = 0.0
    steps: int = 0
    tokens: float = 0.0  # in tables
    capacity: float = 0.0  # of tables
    blocks: float = 0.0  # of the pool
    runs: float = 0.0
    sequences: float = 0.0
    generated: int = 0
    recomputed: int = 0


class Replay:
    """`run` once."""

    def __init__(self, wishes: Seq[Wish], worker: Worker, allocator: Allocator) -> None:
        self.allocator = allocator
        self.sums = Sums()
        self.ended: list[Sequence] = []
        self.allocator_s = 0.0  # CPU time
        self.clock = Clock()
        self._worker = worker
        self._arrivals = deque(
            Sequence(wish, number, self.clock)
            for number, wish in enumerate(sorted(wishes, key=lambda wish: wish.arrived_s))
        )
        self._waiting: deque[Sequence] = deque()  # never admitted
        self._preempted: list[Sequence] = []  # by rank
        self._running: dict[RequestId, Sequence] = {}
        self._behind: list[Sequence] = []  # of them, those who compute tokens again, by rank
        self._num_decoding = 0
        self._context = 0  # tokens of those who decode
        self._events: list[tuple[int, int, int, Sequence]] = []  # (step, number, turn, …)
        self._look_at = 0  # step of the next look at the queue, unless something happens

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @property
    def num_running(self) -> int:
        return len(self._running)

    def run(self) -> None:
        while self.advance():
            pass

    def advance(self) -> bool:
        """On to the next event; False when all is done."""
        if not (self._running or self._preempted or self._waiting):
            if not self._arrivals:
                return False
            self.clock.now_s = max(self.clock.now_s, self._arrivals[0].arrived_s)
        self._arrive()
        began_s = time.process_time()
        self._admit()
        self._grow()
        self.allocator_s += time.process_time() - began_s
        self._step()
        self._end()
        return True

    # -- membership

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].arrived_s <= self.now_s:
            if not self._waiting:
                self._look_at = self.clock.step
            self._waiting.append(self._arrivals.popleft())

    def _admit(self) -> None:
        if self.clock.step < self._look_at:
            return
        while len(self._running) < self._worker.max_num_seqs:
            queue = self._preempted or self._waiting
            if not queue:
                break
            sequence = queue[0]
            blocks = self.allocator.admit(sequence)
            if blocks is None:
                break
            self._preempted.pop(0) if self._preempted else self._waiting.popleft()
            self._begin(sequence, blocks)
        self._look_at = self.clock.step + self._worker.block_size

    def _begin(self, sequence: Sequence, blocks: list[int]) -> None:
        waited_s = self.now_s - sequence.waits_since_s
        sequence.waited_s += waited_s
        if sequence.first_wait_s is None:
            sequence.first_wait_s = waited_s
        sequence.blocks = blocks
        self._running[sequence.request_id] = sequence
        if sequence.missing:
            insort(self._behind, sequence, key=lambda each: each.rank)
        else:
            self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        sequence.decode_on()
        self._num_decoding += 1
        self._context += sequence.num_tokens
        self._expect(sequence)

    def _expect(self, sequence: Sequence) -> None:
        """Its next event: it ends, or the next step would not fit into its table."""
        generated = sequence.num_tokens - sequence.num_prompt_tokens
        room = len(sequence.blocks) * self._worker.block_size - sequence.num_tokens
        steps = min(sequence.output - generated, room + 1)
        sequence.turn += 1
        entry = (self.clock.step + steps, sequence.rank[1], sequence.turn, sequence)
        heapq.heappush(self._events, entry)

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        sequence.turn += 1
        if sequence.missing:
            self._behind.remove(sequence)
        else:
            self._num_decoding -= 1
            self._context -= sequence.num_tokens
        sequence.pause()

    def _grow(self) -> None:
        for sequence in self._due():
            while sequence.request_id in self._running and not self.allocator.grow(sequence):
                self._preempt(self._running[self.allocator.victim(sequence).request_id])
            for request_id in self.allocator.shortened:
                if request_id in self._running:
                    other = self._running[request_id]
                    if not other.missing:
                        self._expect(other)
            self.allocator.shortened.clear()
            if sequence.request_id in self._running:
                self._expect(sequence)

    def _due(self) -> list[Sequence]:
        """Those whose event is now, best rank first; ends are taken already."""
        found = []
        while self._events and self._events[0][0] <= self.clock.step:
            _, _, turn, sequence = heapq.heappop(self._events)
            if turn == sequence.turn:
                found.append(sequence)
        return found

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.allocator.preempt(sequence.request_id)
        sequence.missing = sequence.num_tokens
        sequence.waits_since_s = self.now_s
        insort(self._preempted, sequence, key=lambda each: each.rank)
        self._look_at = self.clock.step + 1

    # -- steps

    def _step(self) -> None:
        if self._behind:
            self._step_with_chunks()
        elif self._num_decoding:
            self._steps(self._num_until_event())

    def _num_until_event(self) -> int:
        while self._events[0][2] != self._events[0][3].turn:
            heapq.heappop(self._events)
        until = self._events[0][0] - self.clock.step
        if self._waiting or self._preempted:
            until = min(until, self._look_at - self.clock.step)
        elif self._arrivals:
            until = min(until, self._steps_within(self._arrivals[0].arrived_s - self.now_s))
        return max(until, 1)

    def _steps_within(self, seconds: float) -> int:
        """Steps until one ends so many seconds or later from now: the root of s·n + c2·b·n(n−1)/2 = seconds."""
        growth = self._worker.decode.c2 * self._num_decoding / 2
        first = self._step_s() - growth
        if growth <= 0.0:
            return math.ceil(seconds / first)
        return math.ceil((math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth))

    def _step_s(self) -> float:
        return self._worker.decode.step_s(self._num_decoding, self._context)

    def _steps(self, count: int, longer_s: float = 0.0) -> None:
        """All who decode get a token in each of `count` steps, which take so much longer in all."""
        num, first_s = self._num_decoding, self._step_s() if self._num_decoding else 0.0
        pairs = count * (count - 1) / 2
        seconds = count * first_s + self._worker.decode.c2 * num * pairs + longer_s
        sums, allocator = self.sums, self.allocator
        sums.busy_s += seconds
        sums.steps += count
        behind = sum(each.num_tokens for each in self._behind)
        sums.tokens += seconds * (self._context + behind + num * (count - 1) / 2)
        sums.capacity += seconds * allocator.num_held * self._worker.block_size
        sums.runs += seconds * allocator.num_runs
        sums.sequences += seconds * len(self._running)
        sums.generated += count * num
        self._context += count * num
        self.clock.step += count
        self.clock.now_s += seconds

    def _step_with_chunks(self) -> None:
        left = self._worker.max_num_batched_tokens - self._num_decoding
        seconds, done = 0.0, []
        for sequence in self._behind:
            if left <= 0:
                break
            chunk = min(left, sequence.missing)
            start = sequence.num_tokens - sequence.missing
            seconds += self._worker.prefill.seconds(start + chunk, start)
            sequence.missing -= chunk
            left -= chunk
            self.sums.recomputed += chunk
            if not sequence.missing:
                done.append(sequence)
        self._steps(1, seconds)
        for sequence in done:  # the last chunk samples
            self._behind.remove(sequence)
            sequence.base += 1
            self.sums.generated += 1
            self._decode(sequence)

    def _end(self) -> None:
        ended = False
        again: list[tuple[int, int, int, Sequence]] = []
        while self._events and self._events[0][0] <= self.clock.step:
            entry = heapq.heappop(self._events)
            sequence = entry[3]
            if entry[2] != sequence.turn:
                continue
            if sequence.is_done:
                self._finish(sequence)
                ended = True
            else:
                again.append(entry)
        for entry in again:
            heapq.heappush(self._events, entry)
        if ended:
            self._look_at = self.clock.step

    def _finish(self, sequence: Sequence) -> None:
        self.allocator.finish(sequence, stopped=sequence.output >= sequence.max_tokens)
        self._leave(sequence)
        self.ended.append(sequence)
