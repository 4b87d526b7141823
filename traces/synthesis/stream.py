"""In which order the requests of a given trace lend their figures, and the gaps between arrivals.

Donors pass through a buffer that shuffles them: one is drawn at random, the next of the trace takes its place. So all
are used equally often, which keeps means and percentiles close for every seed, and each near its own part of the trace,
whose cold start and drifting load are part of its figures. Behind the end comes the second half again, shuffled anew:
what a stretched trace is to go on like.
"""

from __future__ import annotations

from random import Random

from traces.synthesis.fitted import Donor, Fit

_BUFFER_SHARE = 0.04  # of all donors
_MIN_BUFFER = 50
_TRIES = 8  # draws for a donor whose reuse has happened already
_GAPS_IN_A_ROW = 100  # arrivals keep their rhythm, such as ticks of a coarse clock


class DonorStream:
    """Donors without end. `rate`: requests drawn per request of the given trace."""

    def __init__(self, fit: Fit, random: Random, rate: float) -> None:
        self._donors, self._random = fit.donors, random
        self._per_draw = 1 / rate
        size = min(len(fit.donors), max(_MIN_BUFFER, int(len(fit.donors) * _BUFFER_SHARE)))
        self._buffer = [(donor, 0) for donor in fit.donors[:size]]
        self._next = size
        self._round = 0
        self._due = 0.0  # donors to take in

    @property
    def place(self) -> int:
        """Index of the donor in the middle of the buffer."""
        return max(0, self._next - len(self._buffer) // 2) % len(self._donors)

    def draw(self, at_s: float) -> tuple[Donor, int]:
        """A donor for a request at `at_s`, and how often the given trace had come round when it joined.

        One whose reuse is older than the trace waits, if there are others.
        """
        slot = self._random.randrange(len(self._buffer))
        for _ in range(_TRIES):
            reuse = self._buffer[slot][0].reuse
            if reuse is None or reuse.after_s <= at_s:
                break
            slot = self._random.randrange(len(self._buffer))
        drawn = self._buffer[slot]
        self._due += self._per_draw
        while self._due >= 1:
            self._due -= 1
            self._buffer[slot] = self._following()
            slot = self._random.randrange(len(self._buffer))
        return drawn

    def _following(self) -> tuple[Donor, int]:
        if self._next == len(self._donors):
            self._next = len(self._donors) // 2
            self._round += 1
        self._next += 1
        return self._donors[self._next - 1], self._round


class GapStream:
    """Seconds between arrivals without end: rows of the given trace's gaps, from near where the donors come from."""

    def __init__(self, fit: Fit, random: Random, rate: float, donors: DonorStream) -> None:
        self._fit, self._random, self._rate, self._donors = fit, random, rate, donors
        self._place = 1
        self._left = 0

    def draw(self) -> float:
        """Raises nothing; the first donor has no gap and is left out."""
        last = len(self._fit.donors) - 1
        if not self._left:
            near = self._random.randrange(-_GAPS_IN_A_ROW, _GAPS_IN_A_ROW + 1)
            self._place = min(max(1, self._donors.place + near), last)
            self._left = _GAPS_IN_A_ROW
        gap_s = self._fit.donors[self._place].gap_s / self._rate
        self._left -= 1
        self._place = self._place + 1 if self._place < last else max(1, last // 2)
        return gap_s
