"""Steps that the engine has been given and that have not ended: one, or two, where the second continues the first.

**A step that runs ahead takes no decision**: it has the sequences of the one before it, each one token further on, but
for those that certainly end, and newcomers that have all their KV. Where anybody needs more than a free block for that,
or more than one token computed, nothing begins before the step under way has ended. So nobody loses blocks that a step
uses, and a sequence that turns out to have ended is computed once too often, which nobody hears of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from decode_worker.limits import Limits
from decode_worker.sequence import Sequence, SequencePhase
from engine.batch import Slice
from engine.block_pool import BlockPool

Planned = list[tuple[Sequence, Slice]]


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    """Its members may have ended meanwhile."""

    batch: tuple[Sequence, ...]
    slices: tuple[Slice, ...]
    began_at: float


class StepsUnderWay:
    """In the order in which they end."""

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
