"""Composition of steps: which running sequences a step computes, how many tokens of each, and the steps in flight.

Decoding sequences come first, with one token each. The rest of the budgets goes to sequences with more tokens to
compute, by rank. A time budget is corrected by the ratio of recent step times to predicted ones. `StepComposer` neither
allocates nor frees blocks. In steps without chunks, sequences may compute drafts too (`speculation`).
"""

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from moonserve.decode_worker.decisions.limits_and_counters import Counters, Limits
from moonserve.decode_worker.decisions.sequence import Sequence, SequencePhase, rank_of
from moonserve.decode_worker.decisions.speculation import LOOKUP_EVERY, PromptLookup, Speculation, StepTokens
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import MAX_SCORED_TOKENS, Slice

# A dozen steps that agree move `StepTimeCorrection` two thirds of the way. Steps take tenths of a second; load changes
# in seconds.
CORRECTION_WEIGHT = 0.1
MAX_LOG_RATIO = math.log(4.0)

Planned = list[tuple[Sequence, Slice]]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step in flight. Sequences of its batch may have ended since it began."""

    batch: tuple[Sequence, ...]
    slices: tuple[Slice, ...]
    began_at: float


class StepsInFlight:
    """The steps that the engine has received and not finished: one, or two if the second continues the first.

    A step that runs ahead makes no decisions. It has the sequences of the step before it, each one token further,
    without those that are certain to end, and new sequences that have all their KV. If a sequence needs more than a
    free block, or more than one token computed, or has a draft in flight, no step begins before the one in flight has
    ended. So no sequence loses blocks that a step uses. A sequence that turns out to have ended is computed once more,
    which has no effect.
    """

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, planned: Planned, now: float) -> list[Slice]:
        """Records a step of the planned slices and returns them. Does nothing if the plan is empty."""
        if planned:
            batch, slices = zip(*planned, strict=True)
            self._steps.append(StepInFlight(batch, slices, now))
        return [piece for _, piece in planned]

    def end(self) -> StepInFlight:
        return self._steps.popleft()

    def uses(self, sequence: Sequence) -> bool:
        """Returns True if a step in flight computes tokens of the sequence."""
        return any(sequence in step.batch for step in self._steps)

    def ended(self) -> list[Sequence]:
        """Returns the ended sequences whose blocks a step in flight still uses, each once."""
        members = dict.fromkeys(each for step in self._steps for each in step.batch)
        return [each for each in members if each.phase is SequencePhase.ENDED]

    def plan_ahead(self, running: Iterable[Sequence], limits: Limits, pool: BlockPool) -> Planned:
        """Plans the step after the only step in flight, before its tokens are known, and allocates blocks for it.
        Returns an empty plan if no step can run ahead."""
        (step,) = self._steps
        if not all(piece.samples and not piece.num_draft for piece in step.slices):
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
    """Allocates the missing block of each sequence, best rank first. Returns False if the pool runs out; sequences
    keep the blocks that they have received by then."""
    for sequence, piece in sorted(planned, key=_rank):
        if piece.end > len(sequence.block_table) * block_size:
            block = pool.allocate(1)
            if block is None:
                return False
            sequence.block_table += block
    return True


def _rank(planned: tuple[Sequence, Slice]) -> tuple[int, int]:
    return planned[0].rank


class StepTimeCorrection:
    """Ratio of this worker's recent step times to the times that its profiles predict.

    Profiles are measured at the start, when the host runs nothing else. The factor follows the logarithm of
    actual ÷ predicted. Each step's change is bounded, so that one stall moves the factor little. The factor is never
    below 1, since steps that are shorter than predicted promise nothing for later steps.
    """

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        """The current ratio, at least 1."""
        return math.exp(max(self._log, 0.0))

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Records the duration of a step. Ignores values that are not finite or have the wrong sign."""
        if not (0.0 < predicted_s < math.inf and 0.0 <= actual_s < math.inf):
            return
        found = math.log(max(actual_s / predicted_s, 1e-3))
        self._log += CORRECTION_WEIGHT * min(max(found - self._log, -MAX_LOG_RATIO), MAX_LOG_RATIO)
        self._log = max(self._log, -MAX_LOG_RATIO)


class StepComposer:
    """Chooses the sequences and slices of one worker's steps."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self._pace = StepTimeCorrection()  # used only with a time budget

    def compose(self, running: Seq[Sequence]) -> list[Sequence]:
        """Returns the sequences of the next step, with slices cut to the budgets; decoding sequences come first."""
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

    def slices_of(self, batch: Seq[Sequence]) -> Planned:
        """Returns the sequences of a step with their slices, and with drafts where they pay. A draft needs no block and
        no token of the step's budget that another sequence would get."""
        if (settings := self._limits.speculation) is None or any(each.slice.num_tokens > 1 for each in batch):
            return [(each, each.slice) for each in batch]
        limits = self._limits
        step = StepTokens(settings.costs, len(batch), sum(len(each.token_ids) for each in batch))
        left = min(settings.max_rows, limits.max_num_batched_tokens) - len(batch)
        planned: Planned = []
        for sequence in batch:
            most = min(left, sequence.draft_room(limits.block_size, limits.max_model_len))
            draft = _draft(sequence, settings, step, most) if most > 0 else []
            left -= len(draft)
            planned.append((sequence, sequence.with_draft(draft) if draft else sequence.slice))
        return planned

    def observe(self, step: StepInFlight, now: float) -> None:
        """Updates the pace from a step that has just ended. Does nothing without a time budget, and after a step with
        drafts, whose time no profile predicts."""
        if (budget := self._limits.budget) is None or any(piece.num_draft for piece in step.slices):
            return
        decoding = [piece for piece in step.slices if piece.num_tokens == 1]
        chunks = ((each.start, each.num_tokens) for each in step.slices if each.num_tokens > 1)
        predicted_s = budget.step_s(len(decoding), sum(piece.end for piece in decoding), chunks)
        self._pace.observe(predicted_s, now - step.began_at)

    def _chunks(self, decoding: Seq[Sequence], behind: Seq[Sequence]) -> list[int]:
        """Returns how many tokens the next step computes of each of the leading sequences of `behind`."""
        left = self._limits.max_num_batched_tokens - len(decoding)
        if (budget := self._limits.budget) is not None:
            context = sum(len(sequence.token_ids) for sequence in decoding)
            prompts = ((sequence.slice.start, sequence.num_missing) for sequence in behind)
            return budget.slowed(self._pace.factor).chunks(len(decoding), context, prompts, left)
        chunks: list[int] = []
        for sequence in behind:
            if left > 0:
                chunks.append(min(left, sequence.num_missing))
                left -= chunks[-1]
        return chunks


def _draft(sequence: Sequence, settings: Speculation, step: StepTokens, most: int) -> list[int]:
    """Returns the sequence's draft for a step, of at most `most` tokens, and adds it to the step's cost."""
    if sequence.lookup is None:
        sequence.lookup = PromptLookup()
    lookup, num_tokens = sequence.lookup, len(sequence.token_ids)
    if num_tokens - lookup.num_seen < LOOKUP_EVERY and not step.pays(lookup.rate, num_tokens):
        return []
    draft = lookup.draft(sequence.token_ids, settings)
    return draft[: step.add(lookup.rate, num_tokens, min(most, len(draft)))]
