"""`Lookahead` policy: admits requests by their predicted need for blocks.

Requirements, and how each is met:
1. *The pool is full of tokens, not of promises.* A request is admitted if the blocks that all holders and the request
   are expected to hold at once, now and at any later step, fit in the pool (`outlook`).
2. *Preemption is the exception.* The expectation has a margin of some standard deviations, less if a preemption costs
   less than an empty place (`Costs`). Each preemption widens the margin and each admission narrows it a little, so
   wrong predictions cost a few preemptions, not one after another.
3. *Preemption is cheap.* Of the least urgent requests whose blocks suffice, the one with the fewest tokens to recompute
   is preempted; never the best-ranked holder, and none twice while there are others.

Knows only the lengths of ended requests, not a request's future. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from engine.lookahead.base import Books, Growing, Holder, Policy, num_generated
from engine.lookahead.prediction import Outlook, Predictor, outlook
from protocol.profile import DecodeProfile, PrefillProfile

# In standard deviations; tuned on synthetic traces (benchmarks.engine.lookahead).
MARGIN = 2.5
_MOST_MARGIN = 4.0
_WIDENED = 0.5  # added by a preemption
_NARROWED = 0.01  # least amount removed by an admission

_NORMAL = NormalDist()

# Number of requests that end before a refused one is admitted. Tuned on synthetic traces (benchmarks.engine.lookahead):
# with 1, short prompts with long answers yield 2 % less at half of the preemptions; long prompts are not affected.
_ENDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Value of one more sequence, in preemptions, from a worker's measured profiles.

    A request that is not admitted now waits for some others to end. Until then each step could have produced one more
    token for the same constant part of its time, `c0`. A preemption delays all sequences by the time to recompute one.
    Long prompts are expensive to recompute and need a large margin, short ones in small batches a small one.
    """

    decode: DecodeProfile
    prefill: PrefillProfile

    def tolerable(self, num_seqs: int, tokens_each: float, steps: float) -> float:
        """Returns the preemptions per admission at which gain and cost are equal, with `num_seqs` running sequences of
        `tokens_each` tokens, of which the next is expected to end after `steps`.

        Gain: steps · c0 / step_s tokens. Cost: seconds of recomputation · num_seqs / step_s tokens."""
        lost_s = self.prefill.seconds(round(tokens_each), 0) * num_seqs
        return _ENDS * steps * self.decode.c0 / lost_s if lost_s > 0.0 else 1.0


class Lookahead(Policy):
    def __init__(
        self,
        *,
        margin: float = MARGIN,
        costs: Costs | None = None,
        predictor: Predictor | None = None,
        until_known: Policy | None = None,
    ) -> None:
        """`margin`: standard deviations, an upper bound if there are `costs`. `until_known`: policy that admits
        requests without a prediction; None: they are assumed to use up their limits."""
        self.predictor = Predictor() if predictor is None else predictor
        self._margin = margin
        self._costs = costs
        self._until_known = until_known
        self._widened = 0.0
        self._tolerable = 0.0  # preemptions per admission, at the latest admission check

    @property
    def margin(self) -> float:
        """Standard deviations that admissions keep, as of the latest admission check."""
        margin = self._margin
        if self._tolerable > 0.0:
            margin = min(margin, -_NORMAL.inv_cdf(min(self._tolerable, 0.5)))
        return min(margin + self._widened, _MOST_MARGIN)

    def outlook(self, books: Books, *others: Growing) -> Outlook:
        """Predicts the blocks that the holders and `others` will need."""
        requests = [*(holder.request for holder in books.holders.values()), *others]
        # A shared block stays until the last of its holders ends. It is counted once, in `Books.num_shared`.
        shared = [books.shared(each) for each in requests]
        return outlook(requests, self.predictor, books.block_size, shared)

    def admits(self, request: Growing, books: Books) -> bool:
        if self._until_known is not None and self.predictor.curve(request) is None:
            return self._until_known.admits(request, books)
        found = self.outlook(books, request)
        self._weigh(found, books)
        return found.peak(self.margin) + books.num_shared <= books.num_blocks

    def _weigh(self, found: Outlook, books: Books) -> None:
        if self._costs is not None and books.holders:
            num, tokens = len(books.holders), float(found.mean[0]) * books.block_size
            self._tolerable = self._costs.tolerable(num, tokens / (num + 1), found.steps_to_end)

    def victim(self, needy: Growing, books: Books) -> Holder:
        holders = list(books.holders.values())
        best = min(holders, key=lambda holder: holder.request.rank)
        others = [holder for holder in holders if holder is not best] or holders
        # Each holder will need a block soon, so the victim should free enough for all of them.
        return min(others, key=lambda each: _cost(each, len(holders)))

    def admitted(self, request: Growing) -> None:
        # Narrowed so that the tolerable rate of preemptions leaves the margin unchanged.
        narrowed = max(_WIDENED * min(self._tolerable, 1.0), _NARROWED)
        self._widened = max(self._widened - narrowed, 0.0)

    def preempted(self, request: Growing) -> None:
        self._widened = min(self._widened + _WIDENED, _MOST_MARGIN)

    def ended(self, request: Growing, *, stopped: bool | None) -> None:
        if stopped is not None:
            self.predictor.ended(request, stopped=stopped)

    def validate(self) -> None:
        assert 0.0 <= self._widened <= _MOST_MARGIN
        assert self._tolerable >= 0.0
        self.predictor.validate()


def _cost(holder: Holder, missing: int) -> tuple[int, bool, bool, int, int, int]:
    """Sort key of victims, lowest first: least urgent, frees enough, not preempted yet, fewest tokens to recompute."""
    request, suffices = holder.request, len(holder.blocks) >= missing
    return (
        -request.rank[0],
        not suffices,
        holder.times_preempted > 0,
        request.num_tokens if suffices else -len(holder.blocks),
        num_generated(request),
        -request.rank[1],
    )
