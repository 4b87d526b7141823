"""Which of the running sequences a step computes, and how many tokens of each; and the steps that are under way.

Decoding sequences come first, one token each; what is left of the budgets goes to those with more to compute, by rank.
Where steps have a budget of time, it is held to how long steps really take lately. Gives and takes no blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from decode_worker.limits import Counters, Limits
from decode_worker.sequence import Sequence, SequencePhase, rank_of
from engine.batch import MAX_SCORED_TOKENS, Slice
from engine.block_pool import BlockPool

# A dozen steps that agree move `Pace` two thirds of the way. Steps are tenths of a second, changes of load seconds.
WEIGHT = 0.1
MOST_LOG = math.log(4.0)

Planned = list[tuple[Sequence, Slice]]


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """Its members may have ended meanwhile."""

    batch: tuple[Sequence, ...]
    slices: tuple[Slice, ...]
    began_at: float


class StepsUnderWay:
    """Steps that the engine has been given and that have not ended: one, or two where the second continues the first.

    A step that runs ahead takes no decision: it has the sequences of the one before it, each one token further on, but
    for those that certainly end, and newcomers that have all their KV. Where anybody needs more than a free block for
    that, or more than one token computed, nothing begins before the step under way has ended. So nobody loses blocks
    that a step uses. A sequence that turns out to have ended is computed once too often, which has no effect.
    """

    def __init__(self) -> None:
        self._steps: deque[StepUnderWay] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, planned: Planned, now: float) -> list[Slice]:
        """Nothing begins where nothing is planned."""
        if planned:
            batch, slices = zip(*planned, strict=True)
            self._steps.append(StepUnderWay(batch, slices, now))
        return [piece for _, piece in planned]

    def end(self) -> StepUnderWay:
        return self._steps.popleft()

    def use(self, sequence: Sequence) -> bool:
        """Whether one of them computes some of it."""
        return any(sequence in step.batch for step in self._steps)

    def ended(self) -> list[Sequence]:
        """Sequences that ended while a step uses their blocks, each once."""
        members = dict.fromkeys(each for step in self._steps for each in step.batch)
        return [each for each in members if each.phase is SequencePhase.ENDED]

    def ahead(self, running: Iterable[Sequence], limits: Limits, pool: BlockPool) -> Planned:
        """What can be computed behind the only step, before its tokens are known; blocks are allocated for it."""
        (step,) = self._steps
        if not all(piece.samples for piece in step.slices):
            return []
        planned: Planned = []
        for sequence in running:
            if sequence not in step.batch:
                if sequence.num_missing > 1:
                    return []
                planned.append((sequence, sequence.slice))
            elif not sequence.ends_with_next(limits.max_model_len):
                planned.append((sequence, sequence.following()))
        return planned if _have_room(planned, limits.block_size, pool) else []


def _have_room(planned: Planned, block_size: int, pool: BlockPool) -> bool:
    """Blocks for all, best rank first; who got one keeps it."""
    for sequence, piece in sorted(planned, key=_rank):
        if piece.end > len(sequence.block_table) * block_size:
            block = pool.allocate(1)
            if block is None:
                return False
            sequence.block_table += block
    return True


def _rank(planned: tuple[Sequence, Slice]) -> tuple[int, int]:
    return planned[0].rank


class Pace:
    """How many times as long this worker's steps take as its profiles say, lately.

    Profiles are measured at the start, when nobody else computes on the host. The factor follows the logarithm of
    actual ÷ predicted, bounded per step, so that one stall moves it little; it is never below 1, since steps that are
    shorter than predicted promise nothing.
    """

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """At least 1."""
        return math.exp(max(self._log, 0.0))

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """A step took `actual_s`. Impossible figures are ignored."""
        if not (0.0 < predicted_s < math.inf and 0.0 <= actual_s < math.inf):
            return
        found = math.log(max(actual_s / predicted_s, 1e-3))
        self._log += WEIGHT * min(max(found - self._log, -MOST_LOG), MOST_LOG)
        self._log = max(self._log, -MOST_LOG)


class Composition:
    """Chooses the sequences and slices of one worker's steps."""

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
