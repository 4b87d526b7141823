"""Simulates a decode worker in virtual time, over the workers' block pool and admission, with continuous batching.

Batching works as in `decode_worker.decisions.scheduler`. Requests arrive with the KV of their prompt (prefill is not
simulated) and wait in order of arrival until the policy admits them. A preempted sequence has precedence over requests
that were never admitted. It recomputes its tokens in chunks, while other sequences decode. Profiles give the duration
of steps. Between events (an end, a full block table, an arrival, another look at the queue) all sequences get a token
per step, so that a run of steps is an arithmetic series. The policy does not know the length of a request before it
ends.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from benchmarks.engine.lookahead.requests import LoadRequest
from moonserve.decode_worker.decisions.admission_and_preemption import Admission
from moonserve.engine.admission_policy import AdmissionPolicy, BlockHolder, OnDemandPolicy, PoolSnapshot, SequenceView
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Parameters of the simulated worker."""

    decode: DecodeProfile
    prefill: PrefillProfile
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 2048


class WorstCase(OnDemandPolicy):
    """Admits a request only with room for its prompt and its `max_tokens`, so that none is ever preempted."""

    def admits(self, request: SequenceView, books: PoolSnapshot) -> bool:
        requests = [*(holder.request for holder in books.holders.values()), request]
        most = (books.blocks_for(each.num_prompt_tokens + each.max_tokens) for each in requests)
        return sum(most) <= books.num_blocks


class BlockTables:
    """Block tables of all admitted sequences over one pool, under a policy."""

    def __init__(self, num_blocks: int, block_size: int, policy: AdmissionPolicy) -> None:
        self.block_size = block_size
        self.num_looks = self.num_admissions = self.num_preemptions = self.preempted_tokens = 0
        self.pool = BlockPool(
            num_blocks,
            on_added=lambda key, parent: None,
            on_removed=lambda key: None,
            enable_prefix_caching=False,
        )
        self._holders: dict[RequestId, Sequence] = {}
        self._times_preempted: dict[RequestId, int] = {}
        self._admission = Admission(self.pool, block_size, policy)
        self._admission.claims = self._claims

    def _claims(self) -> list[BlockHolder]:
        return [
            BlockHolder(each, each.blocks, self._times_preempted.get(each.request_id, 0))
            for each in self._holders.values()
        ]

    def admit(self, sequence: Sequence) -> bool:
        self.num_looks += 1
        self._admission.forget_refusals()
        taken = self._admission.admit(sequence, (), self._blocks_for(sequence))
        if taken is None:
            return False
        sequence.blocks = taken[1]
        self._holders[sequence.request_id] = sequence
        self.num_admissions += 1
        return True

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.block_size)

    def grow(self, sequence: Sequence) -> bool:
        """Allocates blocks for the sequence's tokens. Returns False if a sequence must be preempted first."""
        missing = self._blocks_for(sequence) - len(sequence.blocks)
        blocks = self.pool.allocate(missing) if missing > 0 else []
        sequence.blocks += blocks or []
        return blocks is not None

    def victim(self, needy: Sequence) -> RequestId:
        return self._admission.choose_victim(needy, self._claims())

    def preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self.preempted_tokens += sequence.num_tokens
        times = self._times_preempted
        times[sequence.request_id] = times.get(sequence.request_id, 0) + 1
        self._release(sequence)
        self._admission.on_preempted(sequence)

    def finish(self, sequence: Sequence, *, stopped: bool | None) -> None:
        self._release(sequence)
        self._admission.on_ended(sequence, stopped=stopped)

    def _release(self, sequence: Sequence) -> None:
        del self._holders[sequence.request_id]
        self.pool.release(sequence.blocks)
        sequence.blocks = []


class Clock:
    """Virtual time, and the number of steps so far, from which decoding sequences derive their lengths."""

    __slots__ = ("now_s", "step")

    def __init__(self) -> None:
        self.step = 0
        self.now_s = 0.0


class Sequence:
    """One request. While it decodes, it grows by one token with every step of the clock."""

    __slots__ = (
        "_clock", "arrived_s", "base", "base_step", "blocks", "first_wait_s", "max_tokens", "missing",
        "num_prompt_tokens", "output", "rank", "request_id", "tenant", "turn", "waited_s", "waits_since_s",
    )  # fmt: skip

    def __init__(self, request: LoadRequest, number: int, clock: Clock) -> None:
        self.request_id = RequestId(str(number))
        self.rank = (0, number)
        self.tenant = request.tenant
        self.num_prompt_tokens = request.prompt
        self.max_tokens = request.limit
        self.output = request.output
        self.arrived_s = self.waits_since_s = request.arrived_s
        self.waited_s = 0.0
        self.first_wait_s: float | None = None
        self.base = request.prompt + 1  # tokens at base_step
        self.base_step: int | None = None  # None: not decoding
        self.missing = 0  # tokens to recompute
        self.turn = 0  # version of its event in the heap; older events are void
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
class Totals:
    """Totals of a replay. `tokens` and `sequences` are integrals over the seconds in which requests run."""

    busy_s: float = 0.0
    steps: int = 0
    tokens: float = 0.0  # in block tables
    sequences: float = 0.0
    generated: int = 0
    recomputed: int = 0


class Replay:
    """Replay of a load on one worker with one policy; `run` may be called once."""

    def __init__(self, requests: Seq[LoadRequest], worker: Worker, policy: AdmissionPolicy) -> None:
        self.tables = BlockTables(worker.num_blocks, worker.block_size, policy)
        self.sums = Totals()
        self.ended: list[Sequence] = []
        self.tables_s = 0.0  # CPU time
        self.clock = Clock()
        self._worker = worker
        self._arrivals = deque(
            Sequence(request, number, self.clock)
            for number, request in enumerate(sorted(requests, key=lambda request: request.arrived_s))
        )
        self._waiting: deque[Sequence] = deque()  # never admitted
        self._preempted: list[Sequence] = []  # by rank
        self._running: dict[RequestId, Sequence] = {}
        self._behind: list[Sequence] = []  # the running ones that recompute tokens, by rank
        self._num_decoding = 0
        self._context = 0  # tokens of decoding sequences
        self._events: list[tuple[int, int, int, Sequence]] = []  # (step, number, turn, …)
        self._look_at = 0  # step of the next look at the queue, if no event comes first

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
        """Advances to the next event. Returns False if all requests have ended."""
        if not (self._running or self._preempted or self._waiting):
            if not self._arrivals:
                return False
            self.clock.now_s = max(self.clock.now_s, self._arrivals[0].arrived_s)
        self._arrive()
        began_s = time.process_time()
        self._admit()
        self._grow()
        self.tables_s += time.process_time() - began_s
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
            if not self.tables.admit(sequence):
                break
            self._preempted.pop(0) if self._preempted else self._waiting.popleft()
            self._begin(sequence)
        self._look_at = self.clock.step + self._worker.block_size

    def _begin(self, sequence: Sequence) -> None:
        waited_s = self.now_s - sequence.waits_since_s
        sequence.waited_s += waited_s
        if sequence.first_wait_s is None:
            sequence.first_wait_s = waited_s
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
        """Schedules the next event of a sequence: its end, or the step for which its block table is too short."""
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
            while sequence.request_id in self._running and not self.tables.grow(sequence):
                self._preempt(self._running[self.tables.victim(sequence)])
            if sequence.request_id in self._running:
                self._expect(sequence)

    def _due(self) -> list[Sequence]:
        """Returns the sequences whose event is due, best rank first; ended ones are already removed."""
        found = []
        while self._events and self._events[0][0] <= self.clock.step:
            _, _, turn, sequence = heapq.heappop(self._events)
            if turn == sequence.turn:
                found.append(sequence)
        return found

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.tables.preempt(sequence)
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
        """Returns the least number of steps that take `seconds` or more: the root of s·n + c2·b·n(n−1)/2 = seconds."""
        growth = self._worker.decode.c2 * self._num_decoding / 2
        first = self._step_s() - growth
        if growth <= 0.0:
            return math.ceil(seconds / first)
        return math.ceil((math.sqrt(first * first + 4 * growth * seconds) - first) / (2 * growth))

    def _step_s(self) -> float:
        return self._worker.decode.step_s(self._num_decoding, self._context)

    def _steps(self, count: int, longer_s: float = 0.0) -> None:
        """Runs `count` steps with a token for each decoding sequence. `longer_s`: extra seconds in total."""
        num, first_s = self._num_decoding, self._step_s() if self._num_decoding else 0.0
        pairs = count * (count - 1) / 2
        seconds = count * first_s + self._worker.decode.c2 * num * pairs + longer_s
        sums = self.sums
        sums.busy_s += seconds
        sums.steps += count
        behind = sum(each.num_tokens for each in self._behind)
        sums.tokens += seconds * (self._context + behind + num * (count - 1) / 2)
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
        self.tables.finish(sequence, stopped=sequence.output >= sequence.max_tokens)
        self._leave(sequence)
        self.ended.append(sequence)
