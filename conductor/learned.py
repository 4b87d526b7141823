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

from conductor.cost.accuracy import Accuracy
from conductor.cost.overhead import Overhead
from conductor.cost.overtaking import Overtaking
from conductor.members import Members
from protocol.length_curve import OutputLengths

SILENT_S = 5.0
HALF_LIFE_S = 5.0


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
