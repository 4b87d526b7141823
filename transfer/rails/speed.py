"""How fast something has been lately, from the ends of its slices.

Owns one estimate: bytes ÷ busy time over about the last ten slices. Busy time counts from when a slice
was sent or the one before it ended, whichever is later, so that a deep queue does not look like a slow
path. Small slices tell latency and not bandwidth, and are left out. Pure. Knows no paths.
"""

from __future__ import annotations

import math

MEASURED_FROM = 64 << 10
"""Bytes: below this, a slice over any transport is mostly latency."""

SETTLED_SLICES = 8

_KEEP = 0.9
"""Weight of the past at each slice: half of it is gone after 7."""

_STALE_S = 10.0
"""What has not been used for this long may have recovered; it is assumed to be as it should be."""


class Speed:
    """An exponentially weighted mean of bandwidth, with a nominal value to start from."""

    __slots__ = ("_busy_s", "_bytes", "_ended_at", "_measured_at", "_num_slices", "nominal")

    def __init__(self, nominal: float | None = None) -> None:
        self.nominal = nominal
        self._bytes = 0.0
        self._busy_s = 0.0
        self._num_slices = 0
        self._ended_at = -math.inf
        self._measured_at = -math.inf

    def forget(self) -> None:
        """Back to the nominal value."""
        self._measured_at = -math.inf
        self._restart()

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """A slice ended `now`, `seconds` after it was sent."""
        busy_s = min(seconds, now - self._ended_at)
        self._ended_at = now
        if nbytes < MEASURED_FROM:
            return
        if now - self._measured_at > _STALE_S:
            self._restart()
        self._bytes = self._bytes * _KEEP + nbytes
        self._busy_s = self._busy_s * _KEEP + max(0.0, busy_s)
        self._num_slices += 1
        self._measured_at = now

    def _restart(self) -> None:
        self._bytes = self._busy_s = 0.0
        self._num_slices = 0

    def measured(self, now: float) -> bool:
        return self._busy_s > 0.0 and now - self._measured_at <= _STALE_S

    def bandwidth(self, now: float) -> float | None:
        """Bytes per second: measured lately, else nominal, else None."""
        return self._bytes / self._busy_s if self.measured(now) else self.nominal

    def settled(self, since: float) -> float | None:
        """The last measurement, if it rests on enough slices and is not older than `since`."""
        if self._num_slices < SETTLED_SLICES or self._measured_at < since or not self._busy_s:
            return None
        return self._bytes / self._busy_s
