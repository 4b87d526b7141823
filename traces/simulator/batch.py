"""A continuous batch in closed form: which sequences take part in the steps, and when those steps end. Pure.

It follows `decode_worker.schedule` step for step: a running sequence keeps its slot until it ends or is preempted;
blocks are taken on demand, one before the step that needs it; when none is left, the worst-ranked sequence that holds
any gives all of its back and computes them again, in chunks beside the decoding ones. What differs is the number of
events: steps between which nobody joins, ends, computes a prompt or runs out of blocks are one segment. **A change
that comes during a step takes effect after it.** With `prompts_first` a prompt is computed whole while decoding
stands still, as engines without chunked prefill do it. What this does not know: where sequences come from.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from protocol.profile import DecodeProfile, PrefillProfile
from protocol.step_budget import StepBudget
from traces.simulator.host import Slowdown
from traces.simulator.segments import Run, Segment, Spread, gaps_of
from traces.simulator.sequence import CountedBlocks, Finished, Outcome, Sampled, Sequence


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Batch:
    """The sequences of one machine. `advance` at `wake_at`, and before anything else is done at an instant."""

    def __init__(
        self,
        *,
        decode: DecodeProfile,
        prefill: PrefillProfile,
        blocks: CountedBlocks,
        block_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        prompts_first: bool = False,
        slowdown: Callable[[int], Slowdown] | None = None,
        spread: Spread = (),
        budget: StepBudget | None = None,
        num_landing: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_landing`: who has blocks besides sequences. `slowdown`: what company costs steps of so many sequences
        that begin now; call `interrupt` when it changes. `spread`: see `gaps_of`. `budget`: of time, for steps with
        chunks."""
        self._decode = decode
        self._prefill = prefill
        self._blocks = blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._prompts_first = prompts_first
        self._slowdown = slowdown
        self._spread = spread
        self._budget = budget
        self._num_landing = num_landing
        self.running: list[Sequence] = []  # in order of admission
        self.waiting: list[Sequence] = []  # by rank
        self.num_preemptions = 0
        self._done: list[Segment] = []
        self._segment: Segment | None = None  # under way
        self._began_at = 0.0  # with a segment
        self._sampling: list[Sequence] = []  # get a token from each step of the segment
        self._chunks: list[tuple[Sequence, int]] = []  # tokens of prompts computed in it

    @property
    def wake_at(self) -> float | None:
        """When the segment under way ends; None = nothing runs."""
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
        """Who has blocks and is wanted: as many stay free when others are let in."""
        among = (*self.running, *self.waiting)
        return self._num_landing() + sum(bool(s.num_blocks) and not s.gone for s in among)

    @property
    def has_preempted(self) -> bool:
        """Whether a sequence waits for blocks; it comes before anyone new."""
        return any(not sequence.num_blocks for sequence in self.waiting)

    def context_tokens(self, now: float) -> int:
        """Tokens of the running sequences."""
        grown = self._steps_done(now) * len(self._sampling)
        return sum(sequence.tokens for sequence in self.running) + grown

    def gaps_so_far(self, sequence: Sequence, now: float) -> list[float]:
        """The times between the tokens that a sequence has had by now, the one to its first token here included."""
        runs, segments = list(sequence.runs), self._done
        if sequence.run_from is not None:
            assert self._segment is not None
            partial = self._segment._replace(num_steps=self._steps_done(now))
            segments = [*self._done, partial]
            runs.append(Run(sequence.run_waited_s, sequence.run_from, len(segments)))
        return gaps_of(runs, segments, self._spread)

    def add(self, sequence: Sequence, now: float) -> None:
        """A sequence with the blocks of its prompt, or without any. It waits at least for the step under way."""
        insort(self.waiting, sequence, key=_rank)
        self.interrupt(now)

    def remove(self, sequence: Sequence, now: float) -> None:
        """A sequence that was added and has not finished is not wanted any more."""
        if sequence in self._sampling or any(sequence is each for each, _ in self._chunks):
            sequence.gone = True  # its blocks are free after the step that uses them
        else:
            among = self.waiting if sequence in self.waiting else self.running
            among.remove(sequence)
            self._blocks.end(sequence)
        self.interrupt(now)

    def interrupt(self, now: float) -> None:
        """Something changed from which the next step may look different: the segment ends with the step under way."""
        if self._segment is None:
            self._begin(now)
            return
        steps = min(self._steps_done(now) + 1, self._segment.num_steps)
        self._segment = self._segment._replace(num_steps=steps)

    def take_grown(self, now: float) -> None:
        """Takes the blocks that the segment's sequences have grown into by now, so that what is free is right."""
        if self._segment is None:
            return
        done = min(self._steps_done(now), self._segment.num_steps - 1)
        for sequence in self._sampling:
            self._cover(sequence, sequence.tokens + done)

    def shorten(self, now: float) -> None:
        """Somebody else took blocks: the segment ends before a step that would lack some."""
        if self._segment is None or self._blocks_until(self._segment.num_steps) <= 0:
            return
        steps = min(self._steps_done(now) + 1, self._segment.num_steps)
        self._segment = self._segment._replace(num_steps=max(steps, self._steps_with_room(self._segment.num_steps)))

    def advance(self, now: float) -> list[Outcome]:
        """What happened until `now`, in order."""
        outcomes: list[Outcome] = []
        while (at := self.wake_at) is not None and at <= now:
            self._end_segment(at, outcomes)
            self._begin(at)
        return outcomes

    # -- the end of a segment

    def _end_segment(self, at: float, outcomes: list[Outcome]) -> None:
        segment = self._segment
        assert segment is not None
        self._segment = None
        self._done.append(segment)
        for sequence, num_tokens in self._chunks:
            sequence.missing -= num_tokens
            if sequence.last_token_at is None:
                sequence.prefill_s += segment.total_s
        self._chunks = []
        for sequence in self._sampling:
            self._sampled(sequence, segment.num_steps, at, outcomes)
        self._sampling = []
        for sequence in [s for s in self.running if s.gone or not s.remaining]:
            self._stop(sequence, at)
            self.running.remove(sequence)
            self._blocks.end(sequence)
            if not sequence.gone:
                gaps_s = gaps_of(sequence.runs, self._done, self._spread)
                outcomes.append(Finished(sequence, at, gaps_s))

    def _sampled(self, sequence: Sequence, steps: int, at: float, outcomes: list[Outcome]) -> None:
        """The sequence has `steps` more tokens."""
        self._cover(sequence, sequence.tokens + steps - 1)
        if sequence.missing == 0 or sequence.last_token_at is None:
            sequence.missing = 1  # computing ends with a token, whose own KV is not there yet
            self._blocks.computed(sequence)
        sequence.tokens += steps
        sequence.remaining -= steps
        if sequence.last_token_at is None:
            sequence.last_token_at = at
            if not sequence.gone:
                outcomes.append(Sampled(sequence, at))

    def _cover(self, sequence: Sequence, num_tokens: int) -> None:
        missing = -(-num_tokens // self._block_size) - sequence.num_blocks
        if missing > 0:
            self._blocks.grow(sequence, missing)

    def _stop(self, sequence: Sequence, at: float) -> None:
        """It gets no tokens from the next segment."""
        if sequence.run_from is not None:
            run = Run(sequence.run_waited_s, sequence.run_from, len(self._done))
            sequence.runs.append(run)
            sequence.run_from = None
            sequence.last_token_at = at

    # -- the begin of the next one

    def _begin(self, now: float) -> None:
        while True:
            num_preemptions = self.num_preemptions
            gave_way = self._grow(now)  # those who run come first
            if self.waiting:
                self._admit()
                gave_way |= self._grow(now)
            if self._compose(now, self.num_preemptions > num_preemptions) or not gave_way:
                return

    def _admit(self) -> None:
        may_restore = True
        for sequence in list(self.waiting):
            if len(self.running) >= self._max_num_seqs:
                return
            if not sequence.num_blocks:
                # A later one must not take the blocks that this one waits for.
                num_blocks = -(-sequence.tokens // self._block_size)
                may_restore = may_restore and self._blocks.restore(sequence, num_blocks, self.num_holders)
                if not may_restore:
                    continue
            self.waiting.remove(sequence)
            self.running.append(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        return sequence.tokens <= sequence.num_blocks * self._block_size

    def _grow(self, now: float) -> bool:
        """Gives running sequences the blocks of their next token, best rank first. True when one gave way."""
        needy = [sequence for sequence in self.running if not self._has_room(sequence)]
        before = len(self.running)
        for sequence in sorted(needy, key=_rank):
            if sequence in self.running:  # not preempted by one before it
                self._extend(sequence, now)
        return len(self.running) < before

    def _extend(self, sequence: Sequence, now: float) -> None:
        """One more block; or the sequence is preempted, or left until a landing ends."""
        while not self._blocks.free:
            holders = [s for s in (*self.running, *self.waiting) if s.num_blocks]
            victim = max(holders, key=_rank)
            if victim is sequence and len(holders) == 1:
                return
            self._preempt(victim, now)
            if victim is sequence:
                return
        self._blocks.grow(sequence, 1)

    def _preempt(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence's blocks; its rank puts it before all that came later."""
        self.num_preemptions += 1
        self._blocks.end(sequence)
        if sequence in self.running:
            self._stop(sequence, now)
            self.running.remove(sequence)
            insort(self.waiting, sequence, key=_rank)

    def _compose(self, now: float, gave_way: bool) -> bool:
        """Starts the next segment; False when nobody can take part in one."""
        ready = [sequence for sequence in self.running if self._has_room(sequence)]
        behind = [sequence for sequence in ready if sequence.missing > 1]
        if behind and self._prompts_first:
            segment = self._prompt_alone(min(behind, key=_rank))
        elif behind:
            segment = self._chunks_beside(ready, behind)
        elif ready:
            segment = self._decode_only(ready, gave_way)
        else:
            segment = None
        for sequence in self.running:
            self._note(sequence, now)
        for sequence in (*self._sampling, *(each for each, _ in self._chunks)):
            sequence.begun_at = now if sequence.begun_at is None else sequence.begun_at
        self._segment, self._began_at = segment and self._slowed(segment), now
        return segment is not None

    def _slowed(self, segment: Segment) -> Segment:
        if self._slowdown is None:
            return segment
        factor, num_others = self._slowdown(len(self._sampling))
        first_s, growth_s = segment.first_s * factor, segment.growth_s * factor
        return Segment(segment.num_steps, first_s, growth_s, num_others)

    def _note(self, sequence: Sequence, now: float) -> None:
        """Opens or closes the run of a sequence, as it takes part in the segment that begins."""
        index = len(self._done)
        if sequence.sampled_in != index:
            self._stop(sequence, now)
        elif sequence.run_from is None and sequence.last_token_at is not None:
            sequence.run_from, sequence.run_waited_s = index, now - sequence.last_token_at

    def _samples(self, sequences: list[Sequence]) -> None:
        index = len(self._done)
        for sequence in sequences:
            sequence.sampled_in = index
        self._sampling = sequences

    def _decode_only(self, ready: list[Sequence], gave_way: bool) -> Segment:
        self._samples(ready)
        steps = min(sequence.remaining for sequence in ready)
        # Whoever waits looks again after the step where that may help; a first token is an event of its own.
        waits = gave_way or len(ready) < len(self.running)
        if waits or any(sequence.last_token_at is None for sequence in ready):
            steps = 1
        growth_s = self._decode.c2 * len(ready)
        return Segment(self._steps_with_room(steps), self._step_s(ready), growth_s)

    def _prompt_alone(self, sequence: Sequence) -> Segment:
        self._chunks = [(sequence, sequence.missing)]
        self._samples([sequence])
        seconds = self._prefill.seconds(sequence.tokens, sequence.tokens - sequence.missing)
        return Segment(1, seconds, 0)

    def _chunks_beside(self, ready: list[Sequence], behind: list[Sequence]) -> Segment:
        """One step; decoding ones come first, the rest of the budgets goes to the best-ranked prompts."""
        sampling = [sequence for sequence in ready if sequence.missing == 1]
        seconds = self._step_s(sampling) if sampling else 0  # exact for exact profiles
        behind = sorted(behind, key=_rank)
        for sequence, num_tokens in zip(behind, self._chunk_tokens(sampling, behind), strict=False):
            start = sequence.tokens - sequence.missing
            seconds += self._prefill.seconds(start + num_tokens, start)
            self._chunks.append((sequence, num_tokens))
            if num_tokens == sequence.missing:
                sampling.append(sequence)
        self._samples(sampling)
        return Segment(1, seconds, 0)

    def _chunk_tokens(self, decoding: list[Sequence], behind: list[Sequence]) -> list[int]:
        """Of each of the leading ones of `behind`, as `decode_worker.schedule` has it."""
        left = self._max_batched_tokens - len(decoding)
        if self._budget is not None:
            context = sum(sequence.tokens for sequence in decoding)
            prompts = ((each.tokens - each.missing, each.missing) for each in behind)
            return self._budget.chunks(len(decoding), context, prompts, left)
        chunks: list[int] = []
        for sequence in behind:
            if left > 0:
                chunks.append(min(left, sequence.missing))
                left -= chunks[-1]
        return chunks

    def _step_s(self, sequences: list[Sequence]) -> float:
        return self._decode.step_s(len(sequences), sum(s.tokens for s in sequences))

    # -- steps and blocks of the segment under way

    def _steps_done(self, now: float) -> int:
        segment = self._segment
        return 0 if segment is None else segment.steps_within(now - self._began_at)

    def _blocks_until(self, steps: int) -> int:
        """Blocks that `steps` steps need and the pool has not."""
        needed = 0
        for sequence in self._sampling:
            blocks = -(-(sequence.tokens + steps - 1) // self._block_size)
            needed += max(blocks - sequence.num_blocks, 0)
        return needed - self._blocks.free

    def _steps_with_room(self, limit: int) -> int:
        """The most steps, at least one and at most `limit`, that need no more blocks than there are."""
        if self._blocks_until(limit) <= 0:
            return limit
        enough, too_many = 1, limit
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self._blocks_until(middle) <= 0:
                enough = middle
            else:
                too_many = middle
        return enough

    def validate(self) -> None:
        """Raises AssertionError unless every sequence is in one place and blocks suffice for the segment."""
        running, waiting = set(self.running), set(self.waiting)
        assert not running & waiting, "a sequence is in two places"
        assert len(running) == len(self.running) <= self._max_num_seqs
        assert self.waiting == sorted(self.waiting, key=_rank), "the waiting are out of order"
        assert all(sequence.num_blocks for sequence in self.running), "one runs without blocks"
        assert all(sequence.remaining > 0 or sequence.gone for sequence in running | waiting)
        assert set(self._sampling) <= running
        if self._segment is not None:
            assert self._sampling or self._chunks
            assert self._blocks_until(self._segment.num_steps) <= 0, "a step lacks blocks"
