"""Estimates learned from reports about all instances together, and their decay. Pure.

Estimates about one instance are kept with that instance. Rejected requests give no reports. So an estimate that is too
pessimistic, learned while the machines were busy with something else, could reject all requests forever, since nothing
would correct it. Therefore each estimate moves back to its initial measurement, by half every `HALF_LIFE_S`, while
requests are rejected and it has had no report for `SILENT_S`. As soon as a request is admitted, its report corrects
the estimate. Nothing decays while no requests are rejected: a cluster that is idle overnight keeps its estimates.
"""

import math

from moonserve.conductor.members import Members
from moonserve.conductor.prediction.accuracy import Accuracy, RatioInterval, Times
from moonserve.conductor.prediction.compute_time import CORRECTION_CLIP, CORRECTION_WEIGHT
from moonserve.protocol.output_length import OutputLengths

SILENT_S = 5.0
HALF_LIFE_S = 5.0


# Smaller times do not matter, and reports may be 0, which has no logarithm.
_EPSILON_S = 1e-4


class RobustDuration:
    """Running estimate of a duration: x ← x + w · clip(log(actual + ε) − x, ±C), seconds = exp(x) − ε.

    The estimator is that of `compute_time.PrefillCorrection`, for the same reason: one outlier moves it by at most 6 %.
    """

    __slots__ = ("_log", "seconds")

    def __init__(self) -> None:
        self._log: float | None = None
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        if not math.isfinite(seconds):
            return
        found = math.log(max(seconds, 0.0) + _EPSILON_S)
        if self._log is None:
            self._log = found
        else:
            self._log += CORRECTION_WEIGHT * min(max(found - self._log, -CORRECTION_CLIP), CORRECTION_CLIP)
        self.seconds = max(math.exp(self._log) - _EPSILON_S, 0.0)

    def decay(self, share: float) -> None:
        """Keeps only this share of the estimate, 0 to 1."""
        if self._log is not None and share < 1.0:
            self.seconds *= share
            self._log = math.log(self.seconds + _EPSILON_S)

    def validate(self) -> None:
        assert math.isfinite(self.seconds)
        assert self.seconds >= 0.0


class Overhead:
    """Parts of a TTFT other than queue, prefix and computing: submission, a landing's grant, the first token's return.

    Every prompt pays the request overhead. It pays the landing overhead only as far as that exceeds its queue time,
    since landings are requested while earlier prompts compute. Both are 0 until something is reported. Knows no
    instance: the way there and back depends on the gateway and the network.
    """

    __slots__ = ("_landing", "_request", "reported_at")

    def __init__(self) -> None:
        self._request = RobustDuration()
        self._landing = RobustDuration()
        self.reported_at = -math.inf  # time of the last report

    def observe(self, actual: Times, now: float, *, lands_only: bool) -> None:
        """Learns from a first token. `lands_only`: its `transfer_s` is the grant of a landing only, because there was
        no prefix to load and blocks were free. Waits for prefixes and blocks belong to other terms."""
        if actual.queue_s is None or actual.transfer_s is None or actual.prefill_s is None:
            return
        self.reported_at = now
        terms_s = actual.queue_s + actual.transfer_s + actual.prefill_s
        self._request.observe(actual.ttft_s - terms_s)
        if lands_only:
            self._landing.observe(actual.transfer_s)

    def decay(self, share: float) -> None:
        """Keeps only this share of both overheads, 0 to 1."""
        self._request.decay(share)
        self._landing.decay(share)

    @property
    def request_s(self) -> float:
        """Overhead of a prompt that needs no landing."""
        return self._request.seconds

    def seconds(self, queue_s: float) -> float:
        """Returns the overhead of a prompt that waits `queue_s` for other prompts."""
        return self._request.seconds + max(self._landing.seconds - queue_s, 0.0)

    def validate(self) -> None:
        self._request.validate()
        self._landing.validate()


SHORTEST_LEAD_S = 0.125
_NUM_BINS = 10  # the last one begins at 32 s
_WEIGHT = 0.02  # of the newest observation; about the last 50 count


class Overtaking:
    """Number of sequences that are placed after a request but land before it, by lead time.

    A decision can foresee only ends of sequences, while later requests with shorter prompts overtake. Without a
    correction, distant predictions would see idle machines, and admission would prefer the longest prompts. Keeps a
    running mean and variance of actual minus foreseen sequences per doubling of the lead, over all decode instances.
    """

    def __init__(self) -> None:
        self._means = [0.0] * _NUM_BINS
        self._variances = [0.0] * _NUM_BINS
        self._counts = [0] * _NUM_BINS

    def observe(self, lead_s: float, surplus: float) -> None:
        """Records that `surplus` more sequences run now than were foreseen `lead_s` ago."""
        at = _bin_of(lead_s)
        self._counts[at] += 1
        weight = max(_WEIGHT, 1.0 / self._counts[at])
        off = surplus - self._means[at]
        self._means[at] += weight * off
        # Welford's update with a constant weight; the variance never goes below 0.
        self._variances[at] += weight * ((1.0 - weight) * off * off - self._variances[at])

    def expected(self, lead_s: float, deviations: float = 0.0) -> float:
        """Returns the mean number of sequences plus this many standard deviations, at least 0."""
        at = _bin_of(lead_s)
        return max(self._means[at] + deviations * math.sqrt(self._variances[at]), 0.0)

    def validate(self) -> None:
        assert all(math.isfinite(mean) for mean in self._means)
        assert all(0.0 <= variance < math.inf for variance in self._variances)


def _bin_of(lead_s: float) -> int:
    return 0 if lead_s <= SHORTEST_LEAD_S else min(int(math.log2(lead_s / SHORTEST_LEAD_S)) + 1, _NUM_BINS - 1)


class LearnedEstimates:
    """All estimates about the cluster: answer lengths, overtaking sequences, overhead, prediction accuracy."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.accuracy = Accuracy()
        self.tbt = RatioInterval()
        self.overtaking = Overtaking()
        self.overhead = Overhead()

    def validate(self) -> None:
        self.lengths.validate()
        self.accuracy.validate()
        self.overtaking.validate()
        self.overhead.validate()


class EstimateDecay:
    """Decays the estimates about the cluster and about each instance while requests are rejected."""

    def __init__(self, members: Members, learned: LearnedEstimates) -> None:
        self._members = members
        self._learned = learned
        self._looked_at = math.inf
        self._refused = False

    def on_rejection(self) -> None:
        """Records that a request was rejected."""
        self._refused = True

    def decay(self, now: float) -> None:
        """Decays the estimates for the time since the last call. Must be called regularly."""
        since, self._looked_at = self._looked_at, now
        refused, self._refused = self._refused, False
        if not refused:
            return
        overhead = self._learned.overhead
        overhead.decay(_left(overhead.reported_at, since, now))
        for instance in self._members:
            instance.decay(_left(instance.reported_at, since, now))


def _left(taught_at: float, since: float, now: float) -> float:
    """Returns the share of an estimate that is left after the time from `since` to `now`."""
    silent_s = now - max(since, taught_at + SILENT_S)
    return 0.5 ** (silent_s / HALF_LIFE_S) if silent_s > 0.0 else 1.0
