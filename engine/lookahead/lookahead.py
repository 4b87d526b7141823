"""`Lookahead`: admission by what requests will need, and blocks ahead of need in one run where there is room.

Requirements, and how each is met:
1. *The pool is full of tokens, not of promises.* A request is admitted when what all holders are expected to hold at
   once, now and at any later step, keeps to the pool with it (`outlook`). Blocks ahead are given back when needed.
2. *Preemption is the exception.* The expectation has a margin of some standard deviations; fewer where a preemption
   costs less than an empty place (`Costs`). Each preemption widens it, each admission narrows it again a little:
   predictions that are off cost a few preemptions, not one after another.
3. *What gives way costs least.* Of those whose blocks suffice the one with the fewest tokens to compute again, never
   the best-ranked one, and no one twice while there are others.
4. *Few calls, few runs.* A table grows by what its request will probably need, as far as its share of what is free
   goes.

Never knows what a request will generate: only what others did. Pure.
"""

from __future__ import annotations

from statistics import NormalDist

from engine.lookahead.base import Books, Growing, Holder, Policy, num_generated
from engine.lookahead.costs import Costs
from engine.lookahead.outlook import Outlook, outlook
from engine.lookahead.predictor import Predictor

# In standard deviations: tuned on synthetic traces (benchmarks.engine.lookahead).
MARGIN = 2.5
_MOST_MARGIN = 4.0
_WIDENED = 0.5  # by a preemption
_NARROWED = 0.01  # by an admission, at least

_NORMAL = NormalDist()
_FREE_SHARE = 0.5  # of the free blocks, what all holders' blocks ahead may take together
_MOST_AHEAD = 8  # blocks; more of them would stand in prompts' way
_LIKELY = 0.5  # blocks ahead are for the tokens that a request will need with this probability


class Lookahead:
    takes_back = True

    def __init__(
        self,
        *,
        margin: float = MARGIN,
        costs: Costs | None = None,
        predictor: Predictor | None = None,
        until_known: Policy | None = None,
    ) -> None:
        """`margin`: standard deviations; with `costs` at most so many. `until_known`: who admits requests of which
        nothing is known yet; None: they are taken to use up their limits."""
        self.predictor = Predictor() if predictor is None else predictor
        self._margin = margin
        self._costs = costs
        self._until_known = until_known
        self._widened = 0.0
        self._tolerable = 0.0  # preemptions per admission, at the latest look

    @property
    def margin(self) -> float:
        """Standard deviations that admissions keep, as of the latest look."""
        margin = self._margin
        if self._tolerable > 0.0:
            margin = min(margin, -_NORMAL.inv_cdf(min(self._tolerable, 0.5)))
        return min(margin + self._widened, _MOST_MARGIN)

    def outlook(self, books: Books, *others: Growing) -> Outlook:
        """What the holders, and these, will need, steps ahead."""
        requests = [*(holder.request for holder in books.holders.values()), *others]
        # What several have stays until the last of them ends: it counts once, beside the outlook.
        shared = [books.shared(each) for each in requests]
        return outlook(requests, self.predictor, books.block_size, shared)

    def first(self, request: Growing, books: Books) -> int | None:
        if self._until_known is not None and self.predictor.curve(request) is None:
            return self._until_known.first(request, books)
        needed = books.blocks_for(request.num_tokens)
        found = self.outlook(books, request)
        self._weigh(found, books)
        fits = found.peak(self.margin) + books.num_shared <= books.num_blocks
        return needed + self.ahead(request, books) if fits else None

    def _weigh(self, found: Outlook, books: Books) -> None:
        if self._costs is not None and books.holders:
            num, tokens = len(books.holders), float(found.mean[0]) * books.block_size
            self._tolerable = self._costs.tolerable(num, tokens / (num + 1), found.steps_to_end)

    def ahead(self, request: Growing, books: Books) -> int:
        share = int(_FREE_SHARE * books.num_free) // (len(books.holders) + 1)
        most = min(share, _MOST_AHEAD)
        if most <= 0:
            return 0
        tokens = request.num_tokens
        likely = tokens + self.predictor.remaining(request, 1.0 - _LIKELY)
        return min(books.blocks_for(likely) - books.blocks_for(tokens), most)

    def victim(self, needy: Growing, books: Books) -> Holder:
        holders = list(books.holders.values())
        best = min(holders, key=lambda holder: holder.request.rank)
        others = [holder for holder in holders if holder is not best] or holders
        # Each holder will want a block soon: who gives way should suffice for all of them.
        return min(others, key=lambda each: _cost(each, len(holders)))

    def admitted(self, request: Growing) -> None:
        # Such that the preemptions that are tolerable keep the margin where it is.
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
    """Least first: the least urgent, who frees enough, for the first time, with the fewest tokens to compute again."""
    request, suffices = holder.request, len(holder.blocks) >= missing
    return (
        -request.rank[0],
        not suffices,
        holder.times_preempted > 0,
        request.num_tokens if suffices else -len(holder.blocks),
        num_generated(request),
        -request.rank[1],
    )
