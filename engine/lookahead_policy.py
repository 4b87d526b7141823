"""`LookaheadPolicy` admits requests by the blocks that all running requests are predicted to need. Pure.

`LengthPredictor` applies `protocol.output_length` to many requests at once: by tenant or prompt length, whichever is
the most specific class with enough ended requests. Predictions are bounded by a request's own limit. Before enough
requests have ended there is no guess: a request is assumed to use up its limit.

`forecast_blocks` sums predictions up to mean, variance and maximum. Every step gives each request a token until it ends
and frees all its blocks. The total is a sum of independent holdings, each present with the probability that its request
still runs, as in LightLLM's past-future scheduler (ASPLOS 2025), but with quantiles of the sum instead of samples.
Later arrivals are not considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from moonserve.engine.admission_policy import AdmissionPolicy, BlockHolder, PoolSnapshot, SequenceView, num_generated
from moonserve.protocol.output_length import EDGES, TAIL, LengthCurve, OutputLengths
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_OBSERVATIONS = 10  # ended requests that a prediction needs


class LengthPredictor:
    """Learns output lengths from every request that ended."""

    def __init__(self) -> None:
        self._lengths = OutputLengths()

    def ended(self, request: SequenceView, *, hit_limit: bool) -> None:
        """Records the length of an ended request, which ended by itself or at its limit (`hit_limit`)."""
        generated = max(num_generated(request), 1)
        self._lengths.observe(
            generated,
            max_tokens=generated if hit_limit else generated + 1,
            prompt_tokens=request.num_prompt_tokens,
            tenant=request.tenant,
        )

    def curve(self, request: SequenceView) -> LengthCurve | None:
        """Returns the length curve of similar requests, or None if too few have ended."""
        curve = self._lengths.curve(prompt_tokens=request.num_prompt_tokens, tenant=request.tenant)
        return curve if curve.num_observed >= MIN_OBSERVATIONS else None

    def alive(self, requests: Sequence[SequenceView], steps: Ints) -> Floats:
        """Returns the probability [requests, steps] that each request still runs after each number of steps."""
        generated = np.array([num_generated(each) for each in requests], np.int64)
        limits = np.array([each.max_tokens for each in requests], np.int64)
        lengths = generated[:, None] + steps
        found = np.ones(lengths.shape)
        for curve, rows in self._by_curve(requests):
            found[rows] = _given(curve, generated[rows], lengths[rows])
        return np.where(lengths < limits[:, None], found, 0.0)

    def _by_curve(self, requests: Sequence[SequenceView]) -> list[tuple[LengthCurve, list[int]]]:
        groups: dict[int, tuple[LengthCurve, list[int]]] = {}
        for row, request in enumerate(requests):
            curve = self.curve(request)
            if curve is not None:
                groups.setdefault(id(curve), (curve, []))[1].append(row)
        return list(groups.values())

    def validate(self) -> None:
        self._lengths.validate()


def _given(curve: LengthCurve, generated: Ints, lengths: Ints) -> Floats:
    """Returns P(length > lengths | length > generated)."""
    survival = curve.survival_with_running(generated)
    alive = np.interp(generated, EDGES, survival)[:, None]
    seen = np.interp(lengths, EDGES, survival) / np.where(alive > 0.0, alive, 1.0)
    start = np.maximum(generated, 1)[:, None]  # for requests longer than all that were observed
    unseen: Floats = (start / np.maximum(lengths, start)) ** TAIL
    return np.where(alive > 0.0, seen, unseen)


_FURTHEST = 1 << 17


def _make_horizons() -> Ints:
    """Returns numbers of steps ahead: 0, 1, then powers of √2."""
    halves = np.round(2.0 ** (np.arange(2, 35) / 2)).astype(np.int64)
    return np.concatenate(([0, 1], halves[halves <= _FURTHEST]))


HORIZONS = _make_horizons()


@dataclass(frozen=True, slots=True)
class BlockForecast:
    """Predicted number of blocks at each of HORIZONS."""

    mean: Floats
    variance: Floats
    most: Floats  # if no request ends before its limit
    ends: Floats  # requests expected to have ended

    def peak(self, deviations: float) -> float:
        """Returns the largest number of blocks at any time, with a margin of `deviations` standard deviations."""
        return float(np.minimum(self.mean + deviations * np.sqrt(self.variance), self.most).max())

    @property
    def steps_to_end(self) -> float:
        """Expected number of steps until one of the requests has ended."""
        at = int(np.searchsorted(self.ends, 1.0))
        return float(HORIZONS[-1]) if at >= len(self.ends) else float(HORIZONS[at] / self.ends[at])


def forecast_blocks(
    requests: Sequence[SequenceView],
    predictor: LengthPredictor,
    block_size: int,
    shared: Sequence[int] | None = None,
) -> BlockForecast:
    """Returns the forecast for these requests without later arrivals. `shared`: number of leading blocks of each
    request that are not counted, since others hold them too."""
    if not requests:
        nothing = np.zeros(len(HORIZONS))
        return BlockForecast(nothing, nothing, nothing, nothing)
    tokens = np.array([each.num_tokens for each in requests], np.int64)
    left = np.array([max(each.max_tokens - num_generated(each), 0) for each in requests], np.int64)
    blocks = -(-(tokens[:, None] + HORIZONS) // block_size)
    if shared is not None:
        blocks -= np.array(shared, np.int64)[:, None]
    alive = predictor.alive(requests, HORIZONS)
    alive[:, 0] = 1.0
    expected = alive * blocks
    return BlockForecast(
        mean=expected.sum(axis=0),
        variance=(expected * (1.0 - alive) * blocks).sum(axis=0),
        ends=(1.0 - alive).sum(axis=0),
        most=(blocks * (left[:, None] >= HORIZONS)).sum(axis=0, dtype=np.float64),
    )


# -- the policy

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
class PreemptionCosts:
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


class LookaheadPolicy(AdmissionPolicy):
    """Admission by predicted need for blocks. It knows only the lengths of ended requests, not a request's future.

    1. *The pool is full of tokens, not of reservations.* A request is admitted if the blocks that all holders and the
       request are expected to hold at once, now and at any later step, fit in the pool (`forecast`).
    2. *Preemption is the exception.* The expectation has a margin of some standard deviations, less if a preemption
       costs less than an empty place (`PreemptionCosts`). Each preemption widens the margin and each admission narrows
       it a little, so wrong predictions cost a few preemptions, not one after another.
    3. *Preemption is cheap.* Of the least urgent requests whose blocks suffice, the one with the fewest tokens to
       recompute is preempted; never the best-ranked holder, and none twice while there are others."""

    def __init__(
        self,
        *,
        margin: float = MARGIN,
        costs: PreemptionCosts | None = None,
        predictor: LengthPredictor | None = None,
        until_known: AdmissionPolicy | None = None,
    ) -> None:
        """`margin`: standard deviations, an upper bound if there are `costs`. `until_known`: policy that admits
        requests without a prediction; None: they are assumed to use up their limits."""
        self.predictor = LengthPredictor() if predictor is None else predictor
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

    def forecast(self, snapshot: PoolSnapshot, *others: SequenceView) -> BlockForecast:
        """Predicts the blocks that the holders and `others` will need."""
        requests = [*(holder.request for holder in snapshot.holders.values()), *others]
        # A shared block stays until the last of its holders ends. It is counted once, in `PoolSnapshot.num_shared`.
        shared = [snapshot.shared(each) for each in requests]
        return forecast_blocks(requests, self.predictor, snapshot.block_size, shared)

    def admits(self, request: SequenceView, snapshot: PoolSnapshot) -> bool:
        if self._until_known is not None and self.predictor.curve(request) is None:
            return self._until_known.admits(request, snapshot)
        found = self.forecast(snapshot, request)
        self._weigh(found, snapshot)
        return found.peak(self.margin) + snapshot.num_shared <= snapshot.num_blocks

    def _weigh(self, found: BlockForecast, snapshot: PoolSnapshot) -> None:
        if self._costs is not None and snapshot.holders:
            num, tokens = len(snapshot.holders), float(found.mean[0]) * snapshot.block_size
            self._tolerable = self._costs.tolerable(num, tokens / (num + 1), found.steps_to_end)

    def victim(self, needy: SequenceView, snapshot: PoolSnapshot) -> BlockHolder:
        holders = list(snapshot.holders.values())
        best = min(holders, key=lambda holder: holder.request.rank)
        others = [holder for holder in holders if holder is not best] or holders
        # Each holder will need a block soon, so the victim should free enough for all of them.
        return min(others, key=lambda each: _cost(each, len(holders)))

    def admitted(self, request: SequenceView) -> None:
        # Narrowed so that the tolerable rate of preemptions leaves the margin unchanged.
        narrowed = max(_WIDENED * min(self._tolerable, 1.0), _NARROWED)
        self._widened = max(self._widened - narrowed, 0.0)

    def preempted(self, request: SequenceView) -> None:
        self._widened = min(self._widened + _WIDENED, _MOST_MARGIN)

    def ended(self, request: SequenceView, *, hit_limit: bool | None) -> None:
        if hit_limit is not None:
            self.predictor.ended(request, hit_limit=hit_limit)

    def validate(self) -> None:
        assert 0.0 <= self._widened <= _MOST_MARGIN
        assert self._tolerable >= 0.0
        self.predictor.validate()


def _cost(holder: BlockHolder, missing: int) -> tuple[int, bool, bool, int, int, int]:
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
