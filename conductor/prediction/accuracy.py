"""Accuracy of recent predictions: quantiles of the relative error of a TTFT, in total and by term, and the interval in
which actual values lie. Pure.

Every error, also that of a term, is relative to the actual TTFT. So terms can be compared, and a wrong prediction for
an empty queue is not infinitely bad. Knows no metric names and no instances.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moonserve.protocol.output_length import DecayedCounts

_SMALLEST_ERROR = 2.0**-10  # 0.1 %; smaller errors do not matter
_PER_DOUBLING = 8
_NUM_BINS = 20 * _PER_DOUBLING  # up to a factor of 1,000
_HALF_LIFE = 200.0
_LEAST_WEIGHT = 1.0 - 2.0 ** (-1.0 / _HALF_LIFE)
_MOST_SIGNED = 2.0  # limits the effect of one absurd actual time on the mean


class Term(StrEnum):
    """Terms of a TTFT, as added up by Algorithm 1."""

    TTFT = "ttft"
    QUEUE = "queue"
    TRANSFER = "transfer"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Predicted or actual seconds; None = unknown."""

    ttft_s: float
    queue_s: float | None = None
    transfer_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermAccuracy:
    num_observed: int
    p50: float  # of |predicted − actual| ÷ actual TTFT, to 5 %
    p90: float
    bias: float  # mean of (predicted − actual) ÷ actual TTFT; above 0 = predictions too long


class Accuracy:
    """Error statistics of every term over about the last 300 predictions."""

    def __init__(self) -> None:
        self._records = {term: _Record() for term in Term}

    def observe(self, predicted: Times, actual: Times) -> None:
        """Records the errors of one request. Ignores times that are not finite, and a TTFT that is not above 0."""
        ttft_s = actual.ttft_s
        if not ttft_s > 0.0:
            return
        # Unrolled for speed: this runs at every first token.
        terms = (
            (Term.TTFT, predicted.ttft_s, ttft_s),
            (Term.QUEUE, predicted.queue_s, actual.queue_s),
            (Term.TRANSFER, predicted.transfer_s, actual.transfer_s),
            (Term.PREFILL, predicted.prefill_s, actual.prefill_s),
        )
        for term, expected_s, found_s in terms:
            if expected_s is not None and found_s is not None:
                self._records[term].add((expected_s - found_s) / ttft_s)

    def of(self, term: Term) -> TermAccuracy | None:
        """Returns the accuracy of a term; None until it is observed."""
        record = self._records[term]
        return record.summary() if record.errors.num_observed else None

    def validate(self) -> None:
        for record in self._records.values():
            record.errors.validate()
            assert abs(record.bias) <= _MOST_SIGNED


class _Record:
    def __init__(self) -> None:
        self.errors = DecayedCounts((_NUM_BINS,), _HALF_LIFE)
        self.bias = 0.0

    def add(self, signed: float) -> None:
        if not math.isfinite(signed):
            return
        self.errors.add(_bin_of(abs(signed)))
        weight = max(_LEAST_WEIGHT, 1.0 / self.errors.num_observed)
        self.bias += weight * (min(max(signed, -_MOST_SIGNED), _MOST_SIGNED) - self.bias)

    def summary(self) -> TermAccuracy:
        return TermAccuracy(
            num_observed=self.errors.num_observed,
            p50=self._quantile(0.5),
            p90=self._quantile(0.9),
            bias=self.bias,
        )

    def _quantile(self, q: float) -> float:
        """Returns the middle of the bin that contains quantile `q`."""
        sums = np.cumsum(self.errors.counts)
        found = int(np.searchsorted(sums, q * sums[-1] * (1 - 1e-12)))
        return float(_SMALLEST_ERROR * 2.0 ** ((found + 0.5) / _PER_DOUBLING))


INTERVAL_SHARE = 0.8
"""Share of actual values that a predicted interval is to contain, with as many below as above."""
_RATIOS_PER_DOUBLING = 32
_LEAST_RATIO, _NUM_RATIOS = 2.0**-7, 14 * _RATIOS_PER_DOUBLING
_MIN_RATIOS = 30  # with fewer, the tails are not known
_RATIOS_PER_LOOK = 8


class RatioInterval:
    """Interval around a prediction, from recent values of actual ÷ predicted: split conformal prediction (Papadopoulos
    et al., 2002) over counts that decay. It needs no model of the errors, only that the next ones are like the last."""

    def __init__(self) -> None:
        self._ratios = DecayedCounts((_NUM_RATIOS,), _HALF_LIFE)
        self._edges: tuple[float, float] | None = None  # None = too few are known
        self._known_until = _MIN_RATIOS  # number of observations after which the edges are looked up again

    def observe(self, predicted: float, actual: float) -> None:
        """Records a prediction that ended. Ignores values that are not above 0."""
        if not (0.0 < predicted < math.inf and 0.0 < actual < math.inf):
            return
        found = int(math.log2(actual / predicted / _LEAST_RATIO) * _RATIOS_PER_DOUBLING)
        self._ratios.add(min(max(found, 0), _NUM_RATIOS - 1))
        if self._ratios.num_observed < self._known_until:
            return
        self._known_until += _RATIOS_PER_LOOK
        sums = np.cumsum(self._ratios.counts)
        tail = (1.0 - INTERVAL_SHARE) / 2
        low, high = np.searchsorted(sums, np.array([tail, 1.0 - tail]) * sums[-1]).tolist()
        first, last = (_LEAST_RATIO * 2.0 ** (edge / _RATIOS_PER_DOUBLING) for edge in (low, high + 1))
        self._edges = first, last

    def around(self, predicted: float) -> tuple[float, float] | None:
        """Returns the interval that is to contain `INTERVAL_SHARE` of the actual values; None if too few are known."""
        return None if self._edges is None else (predicted * self._edges[0], predicted * self._edges[1])


def _bin_of(error: float) -> int:
    if error <= _SMALLEST_ERROR:
        return 0
    return min(int(math.log2(error / _SMALLEST_ERROR) * _PER_DOUBLING), _NUM_BINS - 1)
