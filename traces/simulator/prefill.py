"""A prefill machine, or a group that prefills each prompt together (CPP): queue, preparation, chunks. Pure.

As in the live worker, a few prompts at the head of the queue are *prepared* while earlier ones compute: their landing
is reserved and their prefix loaded. Of the prepared prompts whose landing and prefix are ready, the best-ranked one
computes its next chunk. With `mixes_prompts`, complete remainders of others join a chunk in which a prompt ends, by the
live worker's rule; with `fills_steps`, the next prompts fill each chunk, as in vLLM. In a group, a chunk passes through
one machine after the other, each with its share of the layers, and the next chunk follows one machine behind (chunked
pipeline parallelism, FAST'25 §4.2). A single machine is a group of one. Does not know the location of prefixes, bytes
or decode machines.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from moonserve.protocol.step_time import PrefillProfile

# Number of prompts prepared in addition to the computing one, as `lookahead` in
# `prefill_worker.decisions.shared_state`.
PREPARED_AHEAD = 4


@dataclass(slots=True, eq=False, kw_only=True)
class Prompt:
    """A prompt at this machine: queued, then prepared, then computing, then computed (`computed == num_tokens`)."""

    request_id: str
    rank: tuple[float, ...]  # (priority, arrival + seconds that it yields, number); lower runs first
    num_tokens: int
    submitted_at: float
    is_prepared: bool = False
    awaits_landing: bool = False
    awaits_prefix: bool = False
    loaded_at: float = 0.0  # time at which a prepared prompt had its prefix
    cached: int = 0  # prefix tokens that need not be computed
    dispatched: int = 0  # tokens cached, computed or in the pipeline
    computed: int = 0
    started_at: float | None = None
    load_s: float = 0.0  # delay caused by loading its prefix
    compute_s: float = 0.0  # device time

    @property
    def is_ready(self) -> bool:
        return self.is_prepared and not (self.awaits_landing or self.awaits_prefix)


class Prepare(NamedTuple):
    """Request to reserve a landing and load the prefix. Answered by `landing_granted` and `prefix_loaded`."""

    prompt: Prompt


class ChunkStarted(NamedTuple):
    """KV of the tokens [first, end) is produced until `ends_at`. With the first chunk, [0, cached) is available too."""

    prompt: Prompt
    first: int
    end: int
    ends_at: float


class PromptComputed(NamedTuple):
    """The whole prompt is computed, and its first token is available."""

    prompt: Prompt


class _PromptPart(NamedTuple):
    """The tokens [first, end) of a prompt."""

    prompt: Prompt
    first: int
    end: int


class _Chunk(NamedTuple):
    """A chunk in the pipeline."""

    ends_at: float
    parts: tuple[_PromptPart, ...]


PrefillOutcome = Prepare | ChunkStarted | PromptComputed


@dataclass(slots=True, eq=False)
class PrefillMachine:
    """A prefill machine. Methods return their outcomes and all others until `now`. Call `advance` at `wake_at`."""

    profile: PrefillProfile
    _: KW_ONLY
    chunk_tokens: int
    num_stages: int = 1
    mixes_prompts: bool = False
    fills_steps: bool = False
    # Tokens cached of a prompt that starts, since earlier ones may have computed more of it.
    cached_now: Callable[[Prompt], int] = lambda prompt: prompt.cached
    # Called when more of a prompt is computed, which prompts that start next may share.
    publish: Callable[[Prompt], None] = lambda prompt: None
    slowdown: Callable[[], float] = lambda: 1.0  # factor on the duration of a chunk that begins now
    turnover_s: float = 0.0  # delay by each prompt that has just ended

    _ended_at: float = field(default=0.0, init=False)  # end of the latest chunk
    _num_ended: int = field(default=0, init=False)  # prompts that ended with it
    _prompts: dict[str, Prompt] = field(default_factory=dict, init=False)  # all prompts not yet computed
    _queue: list[Prompt] = field(default_factory=list, init=False)  # prompts not yet prepared, by rank
    _stage_free_at: list[float] = field(init=False)
    _pipeline: deque[_Chunk] = field(default_factory=deque, init=False)  # in order of their ends
    _now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.mixes_prompts |= self.fills_steps
        self._stage_free_at = [0.0] * self.num_stages

    @property
    def wake_at(self) -> float | None:
        """Time at which a chunk ends or the next one can begin; None = nothing is in flight."""
        if not self._pipeline:
            return None
        ends_at, free_at = self._pipeline[0].ends_at, self._stage_free_at[0]
        return min(ends_at, free_at) if free_at > self._now else ends_at

    @property
    def is_computing(self) -> bool:
        return bool(self._pipeline)

    @property
    def num_waiting(self) -> int:
        """Prompts that have not started."""
        return sum(prompt.started_at is None for prompt in self._prompts.values())

    @property
    def num_running(self) -> int:
        return len(self._prompts) - self.num_waiting

    @property
    def queued_tokens(self) -> int:
        """Tokens that are neither computed nor known to be cached."""
        return sum(p.num_tokens - max(p.computed, p.cached) for p in self._prompts.values())

    def queue_s(self) -> float:
        """Returns the predicted seconds until all present prompts are computed."""
        seconds = self.profile.seconds
        prompts = self._prompts.values()
        work_s = sum(seconds(p.num_tokens, max(p.computed, p.cached)) for p in prompts)
        return work_s / self.num_stages

    def submit(self, prompt: Prompt, now: float) -> list[PrefillOutcome]:
        """Adds a new prompt."""
        assert prompt.request_id not in self._prompts
        self._prompts[prompt.request_id] = prompt
        insort(self._queue, prompt, key=lambda waiting: waiting.rank)
        return self.advance(now)

    def landing_granted(self, request_id: str, now: float) -> list[PrefillOutcome]:
        """Records that a prompt's landing is reserved. Unknown requests were cancelled."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            prompt.awaits_landing = False
        return self.advance(now)

    def prefix_loaded(self, request_id: str, cached: int, now: float) -> list[PrefillOutcome]:
        """Records that the first `cached` tokens need not be computed. Unknown requests were cancelled."""
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            assert 0 <= cached < prompt.num_tokens, "the last token is always computed"
            prompt.awaits_prefix = False
            prompt.cached, prompt.loaded_at = cached, now
        return self.advance(now)

    def cancel(self, request_id: str, now: float) -> list[PrefillOutcome]:
        """Drops a prompt. Its chunk in flight is computed to the end. Unknown requests are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt in self._queue:
            self._queue.remove(prompt)
        return self.advance(now)

    def advance(self, now: float) -> list[PrefillOutcome]:
        self._now = now
        outcomes: list[PrefillOutcome] = []
        while self._pipeline and self._pipeline[0].ends_at <= now:
            chunk = self._pipeline.popleft()
            self._ended_at, self._num_ended = chunk.ends_at, 0
            for part in chunk.parts:
                self._computed(part, outcomes)
        while self._stage_free_at[0] <= now and (ready := self._best_ready()):
            outcomes += self._dispatch(ready, now)
        self._prepare(outcomes)
        return outcomes

    def _computed(self, part: _PromptPart, outcomes: list[PrefillOutcome]) -> None:
        prompt = part.prompt
        prompt.computed = part.end
        if self._prompts.get(prompt.request_id) is not prompt:
            return
        self.publish(prompt)
        if part.end == prompt.num_tokens:
            self._num_ended += 1
            del self._prompts[prompt.request_id]
            outcomes.append(PromptComputed(prompt))

    def _prepare(self, outcomes: list[PrefillOutcome]) -> None:
        prompts = self._prompts.values()
        ahead = [p.rank for p in prompts if p.is_prepared and p.started_at is None]
        while self._queue:
            prompt = self._queue[0]
            if sum(rank < prompt.rank for rank in ahead) >= PREPARED_AHEAD:
                return
            del self._queue[0]
            prompt.is_prepared = prompt.awaits_landing = prompt.awaits_prefix = True
            outcomes.append(Prepare(prompt))
            ahead.append(prompt.rank)

    def _best_ready(self) -> list[Prompt]:
        """Returns the prompts that the next chunk may contain, best rank first; in vLLM after those that have begun."""
        ready = [p for p in self._prompts.values() if p.is_ready and p.dispatched < p.num_tokens]
        ready.sort(key=lambda prompt: (self.fills_steps and prompt.started_at is None, prompt.rank))
        return ready if self.mixes_prompts else ready[:1]

    def _dispatch(self, prompts: list[Prompt], now: float) -> list[ChunkStarted]:
        """Sends the next chunk of these prompts into the pipeline."""
        parts = self._parts(prompts, now)
        passes_at, seconds = now, self._chunk_seconds(parts)
        if self._ended_at == now:
            parts[0].prompt.compute_s += self._num_ended * self.turnover_s
            seconds += self._num_ended * self.turnover_s
        for stage in range(self.num_stages):
            passes_at = max(passes_at, self._stage_free_at[stage]) + seconds / self.num_stages
            self._stage_free_at[stage] = passes_at
        self._pipeline.append(_Chunk(passes_at, parts))
        return [ChunkStarted(*part, passes_at) for part in parts]

    def _parts(self, prompts: list[Prompt], now: float) -> tuple[_PromptPart, ...]:
        """Returns each prompt's part of the next chunk, up to the chunk's size."""
        parts: list[_PromptPart] = []
        room = self.chunk_tokens
        num_here = sum(p.dispatched < p.num_tokens for p in self._prompts.values())
        for prompt in prompts:
            if parts and not self._joins_chunk(prompt, room, len(parts), num_here - len(parts)):
                break
            if prompt.started_at is None:
                self._start(prompt, now)
            first = prompt.dispatched
            prompt.dispatched = min(first + room, prompt.num_tokens)
            room -= prompt.dispatched - first
            parts.append(_PromptPart(prompt, first, prompt.dispatched))
        return tuple(parts)

    def _joins_chunk(self, prompt: Prompt, room: int, num_ending: int, num_waiting: int) -> bool:
        """True if a prompt joins a step in which others end: its next part always if steps are filled, else only the
        whole rest, by the rule of `prefill_worker.decisions.steps`."""
        if self.fills_steps:
            return room > 0
        done = max(prompt.dispatched, prompt.cached)
        return prompt.num_tokens - done <= room and self.profile.is_worth_joining(
            prompt.num_tokens, done, num_delayed=num_ending, num_waiting=num_waiting
        )

    def _chunk_seconds(self, parts: tuple[_PromptPart, ...]) -> float:
        """Returns the duration of a chunk and adds each prompt's share to it. The constant term counts once per
        chunk."""
        profile, slowdown, total_s = self.profile, self.slowdown(), 0.0
        shared_s = profile.c0 * (1 - 1 / len(parts))
        for part in parts:
            own_s = (profile.seconds(part.end, part.first) - shared_s) * slowdown
            part.prompt.compute_s += own_s
            total_s += own_s
        return total_s

    def _start(self, prompt: Prompt, now: float) -> None:
        free_at = max(self._stage_free_at[0], prompt.submitted_at)
        prompt.load_s = max(min(now, prompt.loaded_at) - free_at, 0.0)
        prompt.started_at = now
        prompt.cached = max(prompt.cached, self.cached_now(prompt))
        prompt.computed = prompt.dispatched = prompt.cached

    def validate(self) -> None:
        """Raises AssertionError unless every prompt is in one state and the pipeline is in order."""
        waiting = set(self._queue)
        assert waiting <= set(self._prompts.values())
        ends = [chunk.ends_at for chunk in self._pipeline]
        assert ends == sorted(ends)
        assert self._stage_free_at == sorted(self._stage_free_at)
        for prompt in self._prompts.values():
            assert prompt.is_prepared == (prompt not in waiting), "a prompt is lost"
            assert prompt.started_at is None or prompt.is_ready
            assert 0 <= prompt.computed <= prompt.dispatched <= prompt.num_tokens
        if self._stage_free_at[0] <= self._now:
            assert not self._best_ready(), "a machine idles beside work"
