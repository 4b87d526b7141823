"""`Composition`: which of the running sequences a step computes, and how many tokens of each.

Decoding sequences come first, one token each; what is left of the budgets goes to those with more to compute, by rank.
Where steps have a budget of time, it is held to how long steps really take lately. Gives and takes no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from decode_worker.counters import Counters
from decode_worker.limits import Limits
from decode_worker.pace import Pace
from decode_worker.sequence import Sequence, rank_of
from decode_worker.under_way import StepUnderWay
from engine.prompt_scores import MAX_SCORED_TOKENS


class Composition:
    """Of one worker's steps."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self._pace = Pace()  # with a budget

    def compose(self, running: Seq[Sequence]) -> list[Sequence]:
        """The sequences of the next step, their slices cut to the budgets; decoding ones come first."""
        ready = [sequence for sequence in running if sequence.has_room(self._limits.block_size)]
        behind = [sequence for sequence in ready if sequence.num_missing > 1]
        if not behind:
            return ready
        batch = [sequence for sequence in ready if sequence.num_missing == 1]
        behind.sort(key=rank_of)
        scored = MAX_SCORED_TOKENS
        for sequence, num_tokens in zip(behind, self._chunks(batch, behind), strict=False):
            if sequence.is_scored:
                num_tokens = min(num_tokens, scored)
                scored -= num_tokens
            if not num_tokens:
                continue
            sequence.limit_slice(num_tokens)
            self._counters.count_chunk(num_tokens, is_new=sequence.is_new)
            batch.append(sequence)
        return batch

    def learn(self, step: StepUnderWay, now: float) -> None:
        """It has just ended."""
        if (budget := self._limits.budget) is None:
            return
        decoding = [piece for piece in step.slices if piece.num_tokens == 1]
        chunks = ((each.start, each.num_tokens) for each in step.slices if each.num_tokens > 1)
        predicted_s = budget.step_s(len(decoding), sum(piece.end for piece in decoding), chunks)
        self._pace.observe(predicted_s, now - step.began_at)

    def _chunks(self, decoding: Seq[Sequence], behind: Seq[Sequence]) -> list[int]:
        """Tokens that the next step computes of each of the leading ones of `behind`."""
        left = self._limits.max_num_batched_tokens - len(decoding)
        if (budget := self._limits.budget) is not None:
            context = sum(len(sequence.token_ids) for sequence in decoding)
            prompts = ((sequence.slice.start, sequence.num_missing) for sequence in behind)
            slowed = budget.slowed(self._pace.factor)
            return slowed.chunks(len(decoding), context, prompts, left)
        chunks: list[int] = []
        for sequence in behind:
            if left > 0:
                chunks.append(min(left, sequence.num_missing))
                left -= chunks[-1]
        return chunks
