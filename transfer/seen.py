"""How fast bytes pass between this engine and one peer, over all its paths: what is worth measuring of it, as totals.

A period begins when something is under way and ends when nothing is, or after a second. It counts where it moved enough
to be a bandwidth rather than a round trip, in one direction only, since two share what there is. Thread-safe. Knows no
path and no rail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from transfer.base import Op

MEASURED_FROM = 64 << 10
LONGEST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Totals since the start; the seconds are those in which these bytes were under way."""

    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    written_s: float = 0.0


class PeerMeter:
    """Of one peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._began_at = 0.0  # the period, while bytes are in flight
        self._moved = {Op.READ: 0, Op.WRITE: 0}  # in the period
        self._bytes = {Op.READ: 0, Op.WRITE: 0}
        self._seconds = {Op.READ: 0.0, Op.WRITE: 0.0}

    def submitted(self, nbytes: int) -> None:
        with self._lock:
            if not self._in_flight:
                self._begin()
            self._in_flight += nbytes

    def arrived(self, op: Op, nbytes: int, seconds: float) -> None:
        """`seconds`: of this slice, for one that was never submitted."""
        with self._lock:
            if self._in_flight:
                self._moved[op] += nbytes
            elif nbytes >= MEASURED_FROM:
                self._bytes[op] += nbytes
                self._seconds[op] += seconds

    def withdrawn(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= nbytes
            if not self._in_flight or self._clock() - self._began_at >= LONGEST_S:
                self._end()
                self._begin()

    def seen(self) -> Seen:
        with self._lock:
            return Seen(
                read_bytes=self._bytes[Op.READ],
                read_s=self._seconds[Op.READ],
                written_bytes=self._bytes[Op.WRITE],
                written_s=self._seconds[Op.WRITE],
            )

    def _begin(self) -> None:
        self._began_at = self._clock()
        self._moved = {Op.READ: 0, Op.WRITE: 0}

    def _end(self) -> None:
        moved = [(op, nbytes) for op, nbytes in self._moved.items() if nbytes]
        if len(moved) == 1 and moved[0][1] >= MEASURED_FROM:
            [(op, nbytes)] = moved
            self._bytes[op] += nbytes
            self._seconds[op] += self._clock() - self._began_at
