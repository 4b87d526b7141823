"""Distribution of output lengths, learned online: `LengthCurve` for one kind of request, `OutputLengths` for all, over
counts that decay. Pure.
"""

import math
from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_LARGEST = 1e12  # far below the weight next to which a count of 1 is lost to rounding


class DecayedCounts:
    """Array of counts in which an observation weighs half after `half_life` further observations.

    Instead of shrinking all counts at each observation, each new observation weighs more than the one before. That is
    O(1), and all counts are scaled back before they become large."""

    __slots__ = ("_growth", "_newest", "_weights", "num_observed")

    def __init__(self, shape: tuple[int, ...], half_life: float) -> None:
        self._weights = np.zeros(shape)
        self._newest = 1.0  # weight of the latest observation
        self._growth = 2.0 ** (1.0 / half_life)
        self.num_observed = 0

    def add(self, *index: int) -> None:
        self._newest *= self._growth
        if self._newest > _LARGEST:
            self._weights /= self._newest
            self._newest = 1.0
        self._weights[index] += self._newest
        self.num_observed += 1

    @property
    def counts(self) -> Floats:
        """Weights relative to the latest observation, which counts 1. Their sum is at most about half_life / log 2."""
        counts: Floats = self._weights / self._newest
        return counts

    @property
    def total(self) -> float:
        return float(self._weights.sum()) / self._newest

    def validate(self) -> None:
        assert (self._weights >= 0.0).all()
        assert self.total <= self.num_observed * (1 + 1e-9)
        assert 0.0 < self._newest <= _LARGEST


MAX_TOKENS = 1 << 20
# Exponent with which P(length > x) falls beyond the longest observation. On a burst of long answers to a worker that
# knew few ends, 1 led to 130 preemptions instead of 2, and 0.25 admitted a sixth fewer sequences at first
# (benchmarks.engine.lookahead).
TAIL = 0.5
MIN_OBSERVATIONS = 50  # the median of this many is within 7 ranks (two σ, where σ = √(n/4) = 3.5)
MAX_TENANTS = 256  # 5 KiB each
_NUM_CLASSES = 8  # of prompt lengths: below 64 tokens, then by factors of 4
_PER_DOUBLING = 8
_ENDED, _STOPPED = 0, 1
_STALE_SHARE = 0.01  # the curve is recomputed after this many new observations, as a share of all


_DOUBLINGS = np.arange(4 * _PER_DOUBLING, 20 * _PER_DOUBLING + 1) / _PER_DOUBLING
# Edges of the bins. Bin b holds lengths in (edge b, edge b+1].
EDGES: Counts = np.concatenate((np.arange(16), np.round(2.0**_DOUBLINGS))).astype(np.int64)
_EDGE_LIST: list[int] = EDGES.tolist()
_WIDTHS = np.diff(EDGES)


class LengthCurve:
    """Survival curve P(length > x) over bins. Lengths and limits are in tokens, from 1 to MAX_TOKENS.

    Bins are single tokens up to 16 and then eight per doubling, so a length is known to 9 %. A request that stopped at
    its limit counts as censored, with at least this length (Kaplan & Meier 1958), so that low limits do not make
    answers look short. Old observations decay. Within a bin, ends are spread evenly.
    """

    __slots__ = ("_below", "_counts", "_max_weight", "_num_in_curve", "_survival")

    def __init__(self, half_life: float = 1000.0) -> None:
        self._counts = DecayedCounts((2, len(_WIDTHS)), half_life)
        self._max_weight = half_life / math.log(2.0)
        self._survival = np.ones(len(EDGES))  # P(length > edge)
        self._below = EDGES.astype(float)  # Σ P(length > x) over x below the edge
        self._num_in_curve = 0

    @property
    def num_observed(self) -> int:
        return self._counts.num_observed

    def observe(self, num_tokens: int, *, stopped: bool) -> None:
        """Records a request that ended by itself after `num_tokens`, or was `stopped` there by its limit."""
        num_tokens = min(max(num_tokens, 1), MAX_TOKENS)
        if stopped:  # it survived the bins that end at or below num_tokens
            self._counts.add(_STOPPED, bisect_right(_EDGE_LIST, num_tokens) - 2)
        else:
            self._counts.add(_ENDED, bisect_left(_EDGE_LIST, num_tokens) - 1)

    def mean_remaining(self, generated: Counts, max_tokens: Counts) -> Floats:
        """Returns E[min(length, max_tokens) − generated | length > generated], elementwise; 0 if the limit is reached.

        A request longer than all observations is expected to double, since nothing else sets a scale."""
        self._update_curve()
        start = np.clip(np.asarray(generated), 0, MAX_TOKENS)
        end = np.clip(np.asarray(max_tokens), start, MAX_TOKENS)
        alive = self._alive(start)
        known = alive > 0.0
        mean = (self._sum_below(end) - self._sum_below(start)) / np.where(known, alive, 1.0)
        unseen = np.minimum(np.maximum(start, 1), end - start)
        return np.where(known, np.clip(mean, 0.0, end - start), unseen)

    def mean(self, max_tokens: int) -> float:
        """Returns E[min(length, max_tokens)] of a new request. Scalar code costs a tenth of arrays of one element."""
        self._update_curve()
        limit = min(max(max_tokens, 0), MAX_TOKENS)
        found = min(bisect_right(_EDGE_LIST, limit) - 1, len(_EDGE_LIST) - 2)
        into = limit - _EDGE_LIST[found]
        first, last = float(self._survival[found]), float(self._survival[found + 1])
        slope = (last - first) / (_EDGE_LIST[found + 1] - _EDGE_LIST[found])
        return float(self._below[found]) + into * first + slope * into * (into - 1) / 2.0

    def quantile(self, share: float) -> int:
        """Returns the length that this share of answers does not exceed, to 9 %."""
        self._update_curve()
        return _EDGE_LIST[min(int((self._survival > 1.0 - share).sum()), len(_EDGE_LIST) - 1)]

    def survival_with_running(self, running: Counts) -> Floats:
        """Returns P(length > edge) at each of EDGES, counting requests that have produced `running` tokens so far.

        Of the requests that started recently, only short ones have ended, so without the running ones all would seem
        short. They count as survivors of their current bin, so that few ends in a full bin do not look like all.
        Beyond all observations, four times the length has probability 1/2 (`TAIL`), since nothing sets a scale."""
        ended, stopped = self._counts.counts
        bins = np.searchsorted(EDGES, np.clip(running, 0, MAX_TOKENS), side="left") - 1
        stopped = stopped + np.bincount(bins[bins >= 0], minlength=len(_WIDTHS))
        survival = _survival(ended, stopped)
        found = np.flatnonzero(ended + stopped)
        if found.size:
            seen = EDGES[found[-1] + 1 :]
            survival[found[-1] + 1 :] *= (seen[0] / seen) ** TAIL
        return survival

    # -- the curve

    def _update_curve(self) -> None:
        new = self._counts.num_observed - self._num_in_curve
        # The minimum approximates the sum of all weights, which grows with each observation up to a limit.
        if not new or new < _STALE_SHARE * min(self._counts.num_observed, self._max_weight):
            return
        self._num_in_curve = self._counts.num_observed
        self._survival = _survival(*self._counts.counts)
        first, last = self._survival[:-1], self._survival[1:]
        within = _WIDTHS * first + (last - first) * (_WIDTHS - 1) / 2.0
        np.cumsum(within, out=self._below[1:])

    def _place(self, tokens: Counts) -> tuple[Counts, Counts]:
        """Returns the bin that starts at or below each length, and the offset into it."""
        bins = np.clip(np.searchsorted(EDGES, tokens, side="right") - 1, 0, len(_WIDTHS) - 1)
        return bins, tokens - EDGES[bins]

    def _alive(self, tokens: Counts) -> Floats:
        """Returns P(length > tokens)."""
        bins, into = self._place(tokens)
        first, last = self._survival[bins], self._survival[bins + 1]
        alive: Floats = first + (last - first) * into / _WIDTHS[bins]
        return alive

    def _sum_below(self, tokens: Counts) -> Floats:
        """Returns Σ P(length > x) over x < tokens."""
        bins, into = self._place(tokens)
        first, last = self._survival[bins], self._survival[bins + 1]
        slope = (last - first) / _WIDTHS[bins]
        total: Floats = self._below[bins] + into * first + slope * into * (into - 1) / 2.0
        return total

    def validate(self) -> None:
        self._counts.validate()
        assert self._survival[0] == 1.0
        assert (np.diff(self._survival) <= 0.0).all()
        assert (self._survival >= 0.0).all()
        assert (np.diff(self._below) >= 0.0).all()


def _survival(ended: Floats, stopped: Floats) -> Floats:
    """Returns P(length > edge) at each of EDGES from the counts, by bin, of ended and of censored requests."""
    at_risk = np.cumsum((ended + stopped)[::-1])[::-1]
    hazard = np.divide(ended, at_risk, out=np.zeros_like(ended), where=ended > 0.0)
    # Beyond the last end survival is exactly 0, although sums in another order may differ in the last bit.
    hazard[at_risk - ended <= 1e-9 * at_risk] = 1.0
    hazard[at_risk <= 0.0] = 0.0
    found: Floats = np.ones(len(EDGES))
    np.cumprod(1.0 - hazard, out=found[1:])
    return found


class OutputLengths:
    """Expected output lengths, learned from all finished requests: by tenant, by prompt length, and over all requests.

    The most specific curve with enough observations is used. Tenants without a finished request for the longest time
    are forgotten. Without data a request is expected to reach its limit, which is the safe side.
    """

    def __init__(self) -> None:
        self._all = LengthCurve()
        self._classes = tuple(LengthCurve() for _ in range(_NUM_CLASSES))
        self._tenants: dict[str, LengthCurve] = {}  # least recently finished first

    def observe(self, num_tokens: int, *, max_tokens: int, prompt_tokens: int, tenant: str = "") -> None:
        """Records a finished request. It counts as stopped if it reached `max_tokens`."""
        stopped = num_tokens >= max_tokens
        curves = [self._all, self._classes[_class_of(prompt_tokens)]]
        if tenant:
            curves.append(self._tenant(tenant))
        for curve in curves:
            curve.observe(num_tokens, stopped=stopped)

    def curve(self, *, prompt_tokens: int, tenant: str = "") -> LengthCurve:
        """Returns the most specific curve with MIN_OBSERVATIONS observations. It keeps learning."""
        own = self._tenants.get(tenant)
        if own is not None and own.num_observed >= MIN_OBSERVATIONS:
            return own
        alike = self._classes[_class_of(prompt_tokens)]
        return alike if alike.num_observed >= MIN_OBSERVATIONS else self._all

    def expected(self, *, max_tokens: int, prompt_tokens: int, tenant: str = "") -> float:
        """Returns E[output tokens] of a new request."""
        return self.curve(prompt_tokens=prompt_tokens, tenant=tenant).mean(max_tokens)

    def interval(
        self, share: float, *, max_tokens: int, prompt_tokens: int, tenant: str = ""
    ) -> tuple[int, int] | None:
        """Returns the interval that is to contain this share of answers, with as many shorter as longer ones. Returns
        None if too few are known."""
        curve = self.curve(prompt_tokens=prompt_tokens, tenant=tenant)
        if curve.num_observed < MIN_OBSERVATIONS:
            return None
        low, high = (curve.quantile(0.5 + side * share / 2) for side in (-1, 1))
        return min(low, max_tokens), min(high, max_tokens)

    def remaining(self, generated: Counts, max_tokens: Counts) -> Floats:
        """Returns E[remaining tokens] of requests with `generated` tokens, elementwise, from the curve of all."""
        return self._all.mean_remaining(generated, max_tokens)

    def _tenant(self, tenant: str) -> LengthCurve:
        curve = self._tenants.pop(tenant, None) or LengthCurve()
        self._tenants[tenant] = curve
        if len(self._tenants) > MAX_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return curve

    def validate(self) -> None:
        assert len(self._tenants) <= MAX_TENANTS
        assert sum(one.num_observed for one in self._classes) == self._all.num_observed
        for curve in (self._all, *self._classes, *self._tenants.values()):
            curve.validate()


def _class_of(prompt_tokens: int) -> int:
    return min(max((max(prompt_tokens, 1).bit_length() - 5) // 2, 0), _NUM_CLASSES - 1)
