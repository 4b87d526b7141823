"""A continuous batch in closed form: which sequences take part in each step, and when steps end. Pure.

It follows `decode_worker.decisions.scheduler` step for step. A running sequence keeps its slot until it ends or is
preempted. Blocks are allocated on demand, one before the step that needs it. When none is left, the worst-ranked holder
gives back all its blocks and recomputes them later, in chunks next to the decoding sequences. Only the number of events
differs: steps without a join, an end, prompt computation or lack of blocks form one segment. **A change during a step
takes effect after it.** With `prompts_first`, a prompt is computed whole while decoding pauses, as in engines without
chunked prefill. Does not know the origin of sequences.
"""

from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from moonserve.protocol.step_time import DecodeProfile, PrefillProfile, StepBudget
from moonserve.traces.simulator.sequence import (
    BlockPool,
    Finished,
    FirstToken,
    GapSpread,
    Segment,
    SequenceOutcome,
    SequenceState,
    TokenRun,
    gaps_of,
)
from moonserve.traces.simulator.shared_host import Slowdown


def _rank(sequence: SequenceState) -> tuple[int, int]:
    return sequence.rank


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """The sequences of one machine. Call `advance` at `wake_at`, and before any other method at the same time."""

    decode: DecodeProfile
    prefill: PrefillProfile
    blocks: BlockPool
    block_size: int
    max_num_seqs: int
    max_batched_tokens: int
    prompts_first: bool = False
    # Effect of other machines on a step of n sequences that begins now; call `end_after_this_step` when it changes.
    slowdown: Callable[[int], Slowdown] | None = None
    spread: GapSpread = ()  # see `gaps_of`
    budget: StepBudget | None = None  # time limit for steps with chunks
    num_landing: Callable[[], int] = lambda: 0  # number of block holders that are not sequences

    running: list[SequenceState] = field(default_factory=list, init=False)  # in order of admission
    waiting: list[SequenceState] = field(default_factory=list, init=False)  # by rank
    num_preemptions: int = field(default=0, init=False)
    _done: list[Segment] = field(default_factory=list, init=False)
    _segment: Segment | None = field(default=None, init=False)  # in flight
    _began_at: float = field(default=0.0, init=False)  # valid with a segment
    # Get a token from each step of the segment.
    _sampling: list[SequenceState] = field(default_factory=list, init=False)
    # Prompt tokens computed in the segment.
    _chunks: list[tuple[SequenceState, int]] = field(default_factory=list, init=False)

    @property
    def wake_at(self) -> float | None:
        """Time at which the segment in flight ends; None = nothing runs."""
        segment = self._segment
        return None if segment is None else self._began_at + segment.total_s

    @property
    def is_computing(self) -> bool:
        return self._segment is not None

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_holders(self) -> int:
        """Number of live holders of blocks. This many blocks stay free when others are admitted."""
        among = (*self.running, *self.waiting)
        return self.num_landing() + sum(bool(s.num_blocks) and not s.is_cancelled for s in among)

    @property
    def has_preempted(self) -> bool:
        """True if a sequence waits for blocks. It precedes all new ones."""
        return any(not sequence.num_blocks for sequence in self.waiting)

    def context_tokens(self, now: float) -> int:
        """Returns the context tokens of the running sequences, including steps completed by now."""
        grown = self._steps_done(now) * len(self._sampling)
        return sum(sequence.tokens for sequence in self.running) + grown

    def gaps_so_far(self, sequence: SequenceState, now: float) -> list[float]:
        """Returns the times between a sequence's tokens so far, including the one before its first token here."""
        runs, segments = list(sequence.runs), self._done
        if sequence.run_from is not None:
            assert self._segment is not None
            segments = [*self._done, self._segment._replace(num_steps=self._steps_done(now))]
            runs.append(TokenRun(sequence.run_waited_s, sequence.run_from, len(segments)))
        return gaps_of(runs, segments, self.spread)

    def add(self, sequence: SequenceState, now: float) -> None:
        """Adds a sequence that has its prompt's blocks or none. It waits at least for the step in flight."""
        insort(self.waiting, sequence, key=_rank)
        self.end_after_this_step(now)

    def remove(self, sequence: SequenceState, now: float) -> None:
        """Removes a sequence that was added and has not finished."""
        if sequence in self._sampling or any(sequence is each for each, _ in self._chunks):
            sequence.is_cancelled = True  # its blocks are freed after the step that uses them
        else:
            among = self.waiting if sequence in self.waiting else self.running
            among.remove(sequence)
            self.blocks.release_sequence(sequence)
        self.end_after_this_step(now)

    def end_after_this_step(self, now: float) -> None:
        """Ends the segment with the step in flight, since the next step may differ. Begins one if nothing runs."""
        if self._segment is None:
            self._begin(now)
            return
        steps = min(self._steps_done(now) + 1, self._segment.num_steps)
        self._segment = self._segment._replace(num_steps=steps)

    def allocate_grown_blocks(self, now: float) -> None:
        """Takes the blocks that the segment's sequences have grown into by now, so that the free count is exact."""
        if self._segment is None:
            return
        done = min(self._steps_done(now), self._segment.num_steps - 1)
        for sequence in self._sampling:
            self._cover(sequence, sequence.tokens + done)

    def end_before_blocks_run_out(self, now: float) -> None:
        """Ends the segment before the first step that would lack blocks, after others have taken some."""
        if self._segment is None or self._blocks_until(self._segment.num_steps) <= 0:
            return
        steps = min(self._steps_done(now) + 1, self._segment.num_steps)
        self._segment = self._segment._replace(num_steps=max(steps, self._steps_with_room(self._segment.num_steps)))

    def advance(self, now: float) -> list[SequenceOutcome]:
        """Returns the outcomes until `now`, in order."""
        outcomes: list[SequenceOutcome] = []
        while (at := self.wake_at) is not None and at <= now:
            self._end_segment(at, outcomes)
            self._begin(at)
        return outcomes

    # -- end of a segment

    def _end_segment(self, at: float, outcomes: list[SequenceOutcome]) -> None:
        segment = self._segment
        assert segment is not None
        self._segment = None
        self._done.append(segment)
        for sequence, num_tokens in self._chunks:
            sequence.num_uncomputed -= num_tokens
            if sequence.last_token_at is None:
                sequence.prefill_s += segment.total_s
        self._chunks = []
        for sequence in self._sampling:
            self._sampled(sequence, segment.num_steps, at, outcomes)
        self._sampling = []
        for sequence in [s for s in self.running if s.is_cancelled or not s.remaining]:
            self._close_run(sequence, at)
            self.running.remove(sequence)
            self.blocks.release_sequence(sequence)
            if not sequence.is_cancelled:
                gaps_s = gaps_of(sequence.runs, self._done, self.spread)
                outcomes.append(Finished(sequence, at, gaps_s))

    def _sampled(self, sequence: SequenceState, steps: int, at: float, outcomes: list[SequenceOutcome]) -> None:
        """Adds `steps` tokens to a sequence."""
        self._cover(sequence, sequence.tokens + steps - 1)
        if sequence.num_uncomputed == 0 or sequence.last_token_at is None:
            sequence.num_uncomputed = 1  # the computation yields a token, whose own KV is not computed yet
            self.blocks.prompt_computed(sequence)
        sequence.tokens += steps
        sequence.remaining -= steps
        if sequence.last_token_at is None:
            sequence.last_token_at = at
            if not sequence.is_cancelled:
                outcomes.append(FirstToken(sequence, at))

    def _cover(self, sequence: SequenceState, num_tokens: int) -> None:
        num_blocks = -(-num_tokens // self.block_size) - sequence.num_blocks
        if num_blocks > 0:
            self.blocks.grow(sequence, num_blocks)

    def _close_run(self, sequence: SequenceState, at: float) -> None:
        """Closes the sequence's run: it gets no tokens from the next segment."""
        if sequence.run_from is not None:
            run = TokenRun(sequence.run_waited_s, sequence.run_from, len(self._done))
            sequence.runs.append(run)
            sequence.run_from = None
            sequence.last_token_at = at

    # -- start of the next segment

    def _begin(self, now: float) -> None:
        while True:
            num_preemptions = self.num_preemptions
            gave_way = self._grow(now)  # running sequences come first
            if self.waiting:
                self._admit()
                gave_way |= self._grow(now)
            if self._start_segment(now, self.num_preemptions > num_preemptions) or not gave_way:
                return

    def _admit(self) -> None:
        may_restore = True
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                return
            if not sequence.num_blocks:
                # A later sequence must not take the blocks that this one waits for.
                num_blocks = -(-sequence.tokens // self.block_size)
                may_restore = may_restore and self.blocks.allocate_prompt(sequence, num_blocks, self.num_holders)
                if not may_restore:
                    continue
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _has_room(self, sequence: SequenceState) -> bool:
        return sequence.tokens <= sequence.num_blocks * self.block_size

    def _grow(self, now: float) -> bool:
        """Gives running sequences the blocks of their next token, best rank first. True if any was preempted."""
        needy = [sequence for sequence in self.running if not self._has_room(sequence)]
        before = len(self.running)
        for sequence in sorted(needy, key=_rank):
            if sequence in self.running:  # not preempted by an earlier one
                self._extend(sequence, now)
        return len(self.running) < before

    def _extend(self, sequence: SequenceState, now: float) -> None:
        """Allocates one more block, or preempts the sequence. The only holder waits until a landing ends."""
        while not self.blocks.free:
            holders = [s for s in (*self.running, *self.waiting) if s.num_blocks]
            victim = max(holders, key=_rank)
            if victim is sequence and len(holders) == 1:
                return
            self._preempt(victim, now)
            if victim is sequence:
                return
        self.blocks.grow(sequence, 1)

    def _preempt(self, sequence: SequenceState, now: float) -> None:
        """Takes back a sequence's blocks. Its rank puts it before all later ones."""
        self.num_preemptions += 1
        self.blocks.release_sequence(sequence)
        if sequence in self.running:
            self._close_run(sequence, now)
            self.running.remove(sequence)
            insort(self.waiting, sequence, key=_rank)

    def _start_segment(self, now: float, gave_way: bool) -> bool:
        """Starts the next segment. False if no sequence can take part."""
        ready = [sequence for sequence in self.running if self._has_room(sequence)]
        behind = [sequence for sequence in ready if sequence.num_uncomputed > 1]
        if behind and self.prompts_first:
            segment = self._prompt_alone(min(behind, key=_rank))
        elif behind:
            segment = self._chunks_with_decode(ready, behind)
        elif ready:
            segment = self._decode_only(ready, gave_way)
        else:
            segment = None
        for sequence in self.running:
            self._update_run(sequence, now)
        for sequence in (*self._sampling, *(each for each, _ in self._chunks)):
            sequence.begun_at = now if sequence.begun_at is None else sequence.begun_at
        self._segment, self._began_at = segment and self._slowed(segment), now
        return segment is not None

    def _slowed(self, segment: Segment) -> Segment:
        if self.slowdown is None:
            return segment
        factor, num_others = self.slowdown(len(self._sampling))
        first_s, growth_s = segment.first_s * factor, segment.growth_s * factor
        return Segment(segment.num_steps, first_s, growth_s, num_others)

    def _update_run(self, sequence: SequenceState, now: float) -> None:
        """Opens or closes a sequence's run, depending on its part in the segment that begins."""
        index = len(self._done)
        if sequence.sampled_in != index:
            self._close_run(sequence, now)
        elif sequence.run_from is None and sequence.last_token_at is not None:
            sequence.run_from, sequence.run_waited_s = index, now - sequence.last_token_at

    def _samples(self, sequences: list[SequenceState]) -> None:
        index = len(self._done)
        for sequence in sequences:
            sequence.sampled_in = index
        self._sampling = sequences

    def _decode_only(self, ready: list[SequenceState], gave_way: bool) -> Segment:
        self._samples(ready)
        steps = min(sequence.remaining for sequence in ready)
        # A waiting sequence is reconsidered after each step if that may help. A first token ends a segment.
        waits = gave_way or len(ready) < len(self.running)
        if waits or any(sequence.last_token_at is None for sequence in ready):
            steps = 1
        growth_s = self.decode.c2 * len(ready)
        return Segment(self._steps_with_room(steps), self._step_s(ready), growth_s)

    def _prompt_alone(self, sequence: SequenceState) -> Segment:
        self._chunks = [(sequence, sequence.num_uncomputed)]
        self._samples([sequence])
        seconds = self.prefill.seconds(sequence.tokens, sequence.tokens - sequence.num_uncomputed)
        return Segment(1, seconds, 0)

    def _chunks_with_decode(self, ready: list[SequenceState], behind: list[SequenceState]) -> Segment:
        """Returns a segment of one step. Decoding sequences come first; the best-ranked prompts get the rest."""
        sampling = [sequence for sequence in ready if sequence.num_uncomputed == 1]
        seconds = self._step_s(sampling) if sampling else 0  # an int keeps exact profiles exact
        behind = sorted(behind, key=_rank)
        for sequence, num_tokens in zip(behind, self._chunk_tokens(sampling, behind), strict=False):
            start = sequence.tokens - sequence.num_uncomputed
            seconds += self.prefill.seconds(start + num_tokens, start)
            self._chunks.append((sequence, num_tokens))
            if num_tokens == sequence.num_uncomputed:
                sampling.append(sequence)
        self._samples(sampling)
        return Segment(1, seconds, 0)

    def _chunk_tokens(self, decoding: list[SequenceState], behind: list[SequenceState]) -> list[int]:
        """Returns the chunk sizes of the leading prompts of `behind`, by the rule of
        `decode_worker.decisions.scheduler`."""
        left = self.max_batched_tokens - len(decoding)
        if self.budget is not None:
            context = sum(sequence.tokens for sequence in decoding)
            prompts = ((each.tokens - each.num_uncomputed, each.num_uncomputed) for each in behind)
            return self.budget.chunks(len(decoding), context, prompts, left)
        chunks: list[int] = []
        for sequence in behind:
            if left > 0:
                chunks.append(min(left, sequence.num_uncomputed))
                left -= chunks[-1]
        return chunks

    def _step_s(self, sequences: list[SequenceState]) -> float:
        return self.decode.step_s(len(sequences), sum(s.tokens for s in sequences))

    # -- steps and blocks of the segment in flight

    def _steps_done(self, now: float) -> int:
        segment = self._segment
        return 0 if segment is None else segment.steps_within(now - self._began_at)

    def _blocks_until(self, steps: int) -> int:
        """Returns the number of blocks that `steps` steps need beyond the free ones."""
        needed = 0
        for sequence in self._sampling:
            blocks = -(-(sequence.tokens + steps - 1) // self.block_size)
            needed += max(blocks - sequence.num_blocks, 0)
        return needed - self.blocks.free

    def _steps_with_room(self, limit: int) -> int:
        """Returns the largest number of steps, from 1 to `limit`, that need only free blocks."""
        if self._blocks_until(limit) <= 0:
            return limit
        return max(bisect_right(range(1, limit), 0, key=self._blocks_until), 1)

    def validate(self) -> None:
        """Raises AssertionError unless every sequence is in one place and blocks suffice for the segment."""
        running, waiting = set(self.running), set(self.waiting)
        assert not running & waiting, "a sequence is in two places"
        assert len(running) == len(self.running) <= self.max_num_seqs
        assert self.waiting == sorted(self.waiting, key=_rank), "the waiting are out of order"
        assert all(sequence.num_blocks for sequence in self.running), "one runs without blocks"
        assert all(sequence.remaining > 0 or sequence.is_cancelled for sequence in running | waiting)
        assert set(self._sampling) <= running
        if self._segment is not None:
            assert self._sampling or self._chunks
            assert self._blocks_until(self._segment.num_steps) <= 0, "a step lacks blocks"
