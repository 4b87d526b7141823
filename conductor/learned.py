"""What reports have taught about all instances together, and when it is believed less. Pure.

What they teach about one instance is kept with that one. Those who are refused teach nothing. So a belief that is worse
than the truth, learned when the machines were busy with something else, could refuse everybody for good: there is
nothing left that would correct it. So each belief moves back to what was measured at the start, by half in
`HALF_LIFE_S`, while others are refused and it has been silent for `SILENT_S`. As soon as somebody is let in, a report
says what is so. Where nobody is refused nothing fades: a cluster that is idle over night is as slow in the morning as
it was.
"""

from __future__ import annotations

import math

from conductor.cost.accuracy import Accuracy, Times
from conductor.cost.compute import CLIP, WEIGHT
from conductor.members import Members
from protocol.length_curve import OutputLengths

SILENT_S = 5.0
HALF_LIFE_S = 5.0


# Below it nobody asks, and some report nothing at all.
_EPSILON_S = 1e-4


class Middle:
    """One running middle, in seconds: x ← x + w · clip(log(actual + ε) − x, ±C), seconds = exp(x) − ε.

    It is the estimate of `correction`, for the same reason: one wild report moves it by at most 6 %.
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
            self._log += WEIGHT * min(max(found - self._log, -CLIP), CLIP)
        self.seconds = max(math.exp(self._log) - _EPSILON_S, 0.0)

    def fade(self, share: float) -> None:
        """So much of it is believed from now on."""
        if self._log is not None and share < 1.0:
            self.seconds *= share
            self._log = math.log(self.seconds + _EPSILON_S)

    def validate(self) -> None:
        assert math.isfinite(self.seconds)
        assert self.seconds >= 0.0


class Overhead:
    """What a TTFT has beside queue, prefix and computing: submission, a landing's grant, the first token's way back.

    `request_s` every prompt pays; `landing_s` only as far as it does not wait for others anyway, since landings are
    asked for while those compute. Both are 0 until something was reported. Knows no instance: the way there and back
    is the gateway's and the network's.
    """

    __slots__ = ("_landing", "_request", "taught_at")

    def __init__(self) -> None:
        self._request = Middle()
        self._landing = Middle()
        self.taught_at = -math.inf  # when something was reported last

    def observe(self, actual: Times, now: float, *, lands_only: bool) -> None:
        """A first token, as its prefill worker reported it. `lands_only`: its transfer was a landing being granted:
        there was no prefix to load and blocks were free, which are other terms."""
        if actual.queue_s is None or actual.transfer_s is None or actual.prefill_s is None:
            return
        self.taught_at = now
        terms_s = actual.queue_s + actual.transfer_s + actual.prefill_s
        self._request.observe(actual.ttft_s - terms_s)
        if lands_only:
            self._landing.observe(actual.transfer_s)

    def fade(self, share: float) -> None:
        """So much of it is believed from now on, 0 to 1."""
        self._request.fade(share)
        self._landing.fade(share)

    @property
    def request_s(self) -> float:
        """To be added for a prompt that needs no landing."""
        return self._request.seconds

    def seconds(self, queue_s: float) -> float:
        """To be added for a prompt that waits so long for others."""
        return self._request.seconds + max(self._landing.seconds - queue_s, 0.0)

    def validate(self) -> None:
        self._request.validate()
        self._landing.validate()


SHORTEST_S = 0.125
_NUM_BINS = 10  # to a minute and more
_WEIGHT = 0.02  # of the newest: about the last 50


class Overtaking:
    """How many sequences are placed after a decision and land before it does, by how far ahead it looks.

    What a decision knows of the future only ends; in truth new requests with shorter prompts overtake. Without them far
    looks see idle machines, and admission would prefer the longest prompts. Per doubling of the lead one running mean
    of what came over what was known, and one of how far single cases lie from it, over all decode instances.
    """

    def __init__(self) -> None:
        self._means = [0.0] * _NUM_BINS
        self._variances = [0.0] * _NUM_BINS
        self._counts = [0] * _NUM_BINS

    def observe(self, lead_s: float, surplus: float) -> None:
        """So long ago `surplus` fewer sequences than there are now were foreseen at this instant."""
        at = _bin_of(lead_s)
        self._counts[at] += 1
        weight = max(_WEIGHT, 1.0 / self._counts[at])
        off = surplus - self._means[at]
        self._means[at] += weight * off
        # Welford's update with a constant weight: off times what is left of it, which is never below 0.
        self._variances[at] += weight * ((1.0 - weight) * off * off - self._variances[at])

    def expected(self, lead_s: float, deviations: float = 0.0) -> float:
        """Sequences, at least 0; so many standard deviations more than their mean."""
        at = _bin_of(lead_s)
        return max(self._means[at] + deviations * math.sqrt(self._variances[at]), 0.0)

    def validate(self) -> None:
        assert all(math.isfinite(mean) for mean in self._means)
        assert all(0.0 <= variance < math.inf for variance in self._variances)


def _bin_of(lead_s: float) -> int:
    if lead_s <= SHORTEST_S:
        return 0
    return min(int(math.log2(lead_s / SHORTEST_S)) + 1, _NUM_BINS - 1)


class Learned:
    """How long answers are, what comes that nobody foresaw, and how good predictions were."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.accuracy = Accuracy()
        self.overtaking = Overtaking()
        self.overhead = Overhead()

    def validate(self) -> None:
        self.lengths.validate()
        self.accuracy.validate()
        self.overtaking.validate()
        self.overhead.validate()


class Fading:
    """Of what was learned about all instances, and about each."""

    def __init__(self, members: Members, learned: Learned) -> None:
        self._members = members
        self._learned = learned
        self._looked_at = math.inf
        self._refused = False

    def refused(self) -> None:
        """A request was, for load."""
        self._refused = True

    def look(self, now: float) -> None:
        """Asked regularly."""
        since, self._looked_at = self._looked_at, now
        refused, self._refused = self._refused, False
        if not refused:
            return
        overhead = self._learned.overhead
        overhead.fade(_left(overhead.taught_at, since, now))
        for instance in self._members:
            instance.fade(_left(instance.taught_at, since, now))


def _left(taught_at: float, since: float, now: float) -> float:
    """Which share of a belief is left, between two looks."""
    silent_s = now - max(since, taught_at + SILENT_S)
    return 0.5 ** (silent_s / HALF_LIFE_S) if silent_s > 0.0 else 1.0
