"""Cost of prefills and decode steps: formulae fitted offline, corrected by reported times. Pure.

Prefill of n tokens, p of them cached: t(n, p) = c0 + c1·(n−p) + c2·(n²−p²). The polynomial is the paper's regression
on length and prefix length (FAST'25, Algorithm 1, estimate_prefill); c2 is attention, which grows with the square.
Decode step of b sequences that read c tokens of KV in total, which is their TBT: t(b, c) = c0 + c1·b + c2·c. Knows
neither queues nor instances nor future sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from moonserve.conductor.prediction.instance_table import Floats, Ints
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile, fit_relative

P = TypeVar("P", PrefillProfile, DecodeProfile)

_NUM_WORST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One measured point with its prediction."""

    at: tuple[int, int]  # the formula's two arguments
    measured_s: float
    predicted_s: float

    @property
    def relative(self) -> float:
        """(predicted − measured) ÷ measured."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Quantiles of |predicted − measured| ÷ measured over all points."""

    num_points: int
    p50: float
    p90: float
    max: float
    worst: tuple[Residual, ...]  # the largest error first


def report_errors(at: Sequence[tuple[int, int]], measured_s: Floats, predicted_s: Floats) -> ErrorReport:
    """Returns the errors of predictions. Both times have shape [points]; measured times are above zero."""
    errors = np.abs(predicted_s / measured_s - 1.0)
    worst = np.argsort(-errors, kind="stable")[:_NUM_WORST]
    return ErrorReport(
        num_points=len(errors),
        p50=float(np.quantile(errors, 0.5)),
        p90=float(np.quantile(errors, 0.9)),
        max=float(errors.max()),
        worst=tuple(
            Residual(at=at[i], measured_s=float(measured_s[i]), predicted_s=float(predicted_s[i]))
            for i in map(int, worst)
        ),
    )


# No slots: a frozen dataclass with slots cannot be instantiated as `ProfileFit[…]`.
@dataclass(frozen=True, kw_only=True)
class ProfileFit(Generic[P]):
    profile: P
    errors: ErrorReport  # of the points it was fitted to


def fit_profile(
    kind: type[P],
    at: tuple[Ints, Ints],
    columns: Sequence[Floats | Ints],
    seconds: Floats,
) -> ProfileFit[P]:
    """Fits c0 · columns[0] + c1 · columns[1] + c2 · columns[2] to `seconds`; all arrays have shape [points]. `at`: the
    formula's arguments at each point, for the error report."""
    matrix, seconds = np.stack(columns, axis=-1).astype(float), np.asarray(seconds, float)
    coefficients = fit_relative(matrix, seconds)
    c0, c1, c2 = map(float, coefficients)
    points = list(zip(at[0].tolist(), at[1].tolist(), strict=True))
    errors = report_errors(points, seconds, matrix @ coefficients)
    return ProfileFit(profile=kind(c0=c0, c1=c1, c2=c2), errors=errors)


# Window of about (2−w)/w = 9 reports: a busy neighbour shows within seconds, and noise is a third of a single report's.
CORRECTION_WEIGHT = 0.2
CORRECTION_CLIP = 0.3  # a report that is 35 % off still counts in full


class DecodeCorrection:
    """Ratio of an instance's current times to its formula: one factor, learned from its reports.

    The factor f is the exponential of a running estimate of log(actual / predicted):

        x ← x + w · clip(log(actual / predicted) − x, ±C),   f = exp(x),   |x| ≤ log MAX_FACTOR

    The logarithm makes "twice as slow" and "twice as fast" equally distant and centres relative errors correctly. The
    clipped step makes it Huber's estimate of location: one outlier moves f by at most exp(w·C), a factor of 6 %.

    Speed: at a distance beyond C the estimate moves w·C per report; within C the distance shrinks by (1−w). So after a
    machine becomes 2× slower, f is within 5 % after 15 reports, after 4× within 27. Noise: under independent noise of
    log-deviation σ ≤ C the estimate deviates by σ·√(w/(2−w)) = σ/3. The factor is 1 until something is reported.
    """

    __slots__ = ("_log", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.factor = 1.0  # actual ÷ predicted by the formula alone

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Updates the factor. `predicted_s`: by the formula alone. Ignores times that are not positive and finite."""
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < math.inf):
            return
        bound = math.log(MAX_FACTOR)
        step = math.log(actual_s) - math.log(predicted_s) - self._log
        self._log += CORRECTION_WEIGHT * min(max(step, -CORRECTION_CLIP), CORRECTION_CLIP)
        self._log = min(max(self._log, -bound), bound)
        self.factor = math.exp(self._log)

    def decay(self, share: float) -> None:
        """Keeps only this share, 0 to 1, of the factor's logarithm, which moves the factor towards 1."""
        self._log *= share
        self.factor = math.exp(self._log)

    def validate(self) -> None:
        assert self.factor * (1 + 1e-12) >= 1.0 / MAX_FACTOR
        assert self.factor <= MAX_FACTOR * (1 + 1e-12)
        assert math.isclose(self.factor, math.exp(self._log))


# ---- prompts

FORGETTING = 0.9  # λ: weight of a report relative to the next one; about the last 10 count
TRACKING_CLIP = 0.4  # C: a report that is 50 % off still counts in full
NOISE = 0.2  # relative error of a report of usual length
PRIOR = 0.5  # relative error of a measured coefficient: the initial P
MAX_FACTOR = 8.0  # a larger factor indicates a broken clock or formula, not a slow machine
_MEAN_WEIGHT = 0.05


class PrefillCorrection:
    """Correction factors of one instance's prefill formula, learned from reports; both are 1 until the first report.

    A prefill takes a·L + b·Q seconds, where L is the formula's time that grows with tokens and Q its time of attention.
    A single factor cannot fit: a formula measured on short prompts is off by another factor for long ones, and each
    length would pull the factor its own way. With h = (L, Q) / (a·L + b·Q), a report updates

        e = clip(log(actual / predicted), ±C),   K = P·h / (h'·P·h + R),   (a, b) += K·e,   P = (P − K·h'·P) / λ

    This is recursive least squares of the relative error with forgetting (Ljung & Söderström 1983, ch. 2): each report
    counts λ times the next one. R, the usual error of a report, is larger for short times, which load spikes distort
    most: proportional to mean ÷ predicted. P never exceeds its initial value, so that a factor without reports for
    a long time is not moved arbitrarily by one report.
    """

    __slots__ = ("_covariance", "_mean_s", "linear", "square")

    def __init__(self) -> None:
        self.linear = 1.0  # actual ÷ formula, of the part that grows with tokens
        self.square = 1.0  # of the part that grows with their square
        self._covariance = (PRIOR**2, 0.0, PRIOR**2)  # of linear, of both, of square
        self._mean_s = 0.0  # of predictions; 0 = none yet

    def seconds(self, linear_s: float, square_s: float) -> float:
        return self.linear * linear_s + self.square * square_s

    def observe(self, linear_s: float, square_s: float, actual_s: float) -> None:
        """Updates the factors. The parts are by the formula alone. Ignores times that are not positive and finite."""
        predicted_s = self.seconds(linear_s, square_s)
        if not (0.0 < predicted_s < math.inf and 0.0 < actual_s < math.inf):
            return
        self._mean_s += (_MEAN_WEIGHT if self._mean_s else 1.0) * (predicted_s - self._mean_s)
        error = min(max(math.log(actual_s) - math.log(predicted_s), -TRACKING_CLIP), TRACKING_CLIP)
        length = min(max(predicted_s / self._mean_s, 1.0 / MAX_FACTOR), MAX_FACTOR)
        noise = NOISE**2 / length
        self._update(linear_s / predicted_s, square_s / predicted_s, error, noise)

    def decay(self, share: float) -> None:
        """Keeps only this share, 0 to 1, of the factors' logarithms, which moves the factors towards 1."""
        self.linear **= share
        self.square **= share

    def _update(self, x: float, y: float, error: float, noise: float) -> None:
        xx, xy, yy = self._covariance
        towards_x, towards_y = xx * x + xy * y, xy * x + yy * y
        total = x * towards_x + y * towards_y + noise
        self.linear = _bounded(self.linear + towards_x / total * error)
        self.square = _bounded(self.square + towards_y / total * error)
        xx -= towards_x * towards_x / total
        xy -= towards_x * towards_y / total
        yy -= towards_y * towards_y / total
        # One scale for all entries keeps it a covariance matrix.
        scale = min(1.0 / FORGETTING, max(PRIOR**2 / max(xx, yy), 1.0))
        self._covariance = (xx * scale, xy * scale, yy * scale)

    def validate(self) -> None:
        xx, xy, yy = self._covariance
        assert 0.0 <= xx <= PRIOR**2 * (1 + 1e-9)
        assert 0.0 <= yy <= PRIOR**2 * (1 + 1e-9)
        assert xy * xy <= xx * yy * (1 + 1e-6) + 1e-18, "not a covariance"
        assert 1.0 / MAX_FACTOR <= self.linear <= MAX_FACTOR
        assert 1.0 / MAX_FACTOR <= self.square <= MAX_FACTOR


def _bounded(factor: float) -> float:
    return min(max(factor, 1.0 / MAX_FACTOR), MAX_FACTOR)


PrefillFit = ProfileFit[PrefillProfile]  # `at` is (tokens, cached)


def fit_prefill(num_tokens: Ints, num_cached: Ints, seconds: Floats) -> PrefillFit:
    """Fits the prefill formula; arrays of shape [points]. Raises InvalidRequest if there are no points or a time is not
    above zero."""
    n, p = np.asarray(num_tokens, np.int64), np.asarray(num_cached, np.int64)
    return fit_profile(PrefillProfile, (n, p), (np.ones(len(n)), n - p, n**2 - p**2), seconds)


class PrefillCost:
    """Prefill formula of one instance, with its learned correction."""

    def __init__(self, profile: PrefillProfile) -> None:
        self.profile = profile
        self.correction = PrefillCorrection()

    @property
    def current(self) -> PrefillProfile:
        """The corrected formula."""
        linear, square, profile = self.correction.linear, self.correction.square, self.profile
        return PrefillProfile(c0=linear * profile.c0, c1=linear * profile.c1, c2=square * profile.c2)

    def observe(self, num_tokens: int, num_cached: int, seconds: float) -> None:
        """Learns from one prefill of `seconds`, without waiting. Impossible reports are ignored."""
        if 0 <= num_cached < num_tokens:
            self.correction.observe(*self._parts(num_tokens, num_cached), seconds)

    def _parts(self, num_tokens: int, num_cached: int) -> tuple[float, float]:
        """Returns the seconds that grow with tokens, the constant included, and those that grow with their square."""
        square_s = self.profile.c2 * (num_tokens * num_tokens - num_cached * num_cached)
        return self.profile.seconds(num_tokens, num_cached) - square_s, square_s

    def validate(self) -> None:
        self.correction.validate()


# ---- steps

DecodeFit = ProfileFit[DecodeProfile]  # `at` is (sequences, context tokens in all)


def fit_decode(num_seqs: Ints, context_tokens: Ints, seconds: Floats) -> DecodeFit:
    """Fits the decode formula; arrays of shape [points]. Raises InvalidRequest if there are no points or a time is not
    above zero."""
    b, c = np.asarray(num_seqs, np.int64), np.asarray(context_tokens, np.int64)
    return fit_profile(DecodeProfile, (b, c), (np.ones(len(b)), b, c), seconds)


class DecodeCost:
    """Decode formula of one instance, with its learned correction."""

    def __init__(self, profile: DecodeProfile) -> None:
        self.profile = profile
        self.correction = DecodeCorrection()

    @property
    def current(self) -> DecodeProfile:
        """The corrected formula."""
        factor, profile = self.correction.factor, self.profile
        return DecodeProfile(c0=factor * profile.c0, c1=factor * profile.c1, c2=factor * profile.c2)

    def observe(self, num_seqs: float, context_tokens: float, seconds: float) -> None:
        """Learns from a step, or from the means of several, since the formula is linear. Ignores impossible reports."""
        if 0 < num_seqs < math.inf and 0 <= context_tokens < math.inf:
            self.correction.observe(self.profile.step_s(num_seqs, context_tokens), seconds)

    def validate(self) -> None:
        self.correction.validate()
