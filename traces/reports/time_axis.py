"""Virtual time along a plot: one unit for a whole page, and bins of round lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traces.reports.picture import Subject

_BINS_S = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """From 0 to `end_s`."""

    end_s: float
    unit: str
    seconds_per_unit: float

    @property
    def end(self) -> float:
        return self.end_s / self.seconds_per_unit

    @property
    def label(self) -> str:
        return f"time, {self.unit}"


def time_axis(subjects: Sequence[Subject]) -> TimeAxis:
    """Of the longest result, samples that were taken after its end included."""
    ends = [each.result.duration_s for each in subjects]
    ends += [each.result.instances[-1].at_s for each in subjects if each.result.instances]
    ends += [each.result.replicas[-1].at_s for each in subjects if each.result.replicas]
    end_s = max(ends, default=0.0) or 1.0
    for unit, length_s, least in (("d", 86_400.0, 4), ("h", 3600.0, 4), ("min", 60.0, 5)):
        if end_s >= least * length_s:
            return TimeAxis(end_s=end_s, unit=unit, seconds_per_unit=length_s)
    return TimeAxis(end_s=end_s, unit="s", seconds_per_unit=1.0)


def bin_length_s(end_s: float, most: int) -> float:
    """The shortest round length that needs at most so many bins."""
    for length_s in _BINS_S:
        if end_s / length_s <= most:
            return float(length_s)
    return end_s / most
