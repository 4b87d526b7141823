"""How fast bytes pass between this engine and one peer, over all its paths: what is worth measuring of it, as totals.

A period begins when something is under way and ends when nothing is, or after a second. It counts where it moved enough
to be a bandwidth rather than a round trip, in one direction only, since two share what there is. Thread-safe. Knows no
path and no rail.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from transfer.base import Op
from transfer.paths.chooser import MEASURED_FROM

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


BUCKETS_S = (50e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 50e-3, 250e-3, 1.0, 5.0)
"""Upper bounds of the latency histogram: one slice, from being handed to a session to its end."""


class Incident(StrEnum):
    """What is counted one by one; `metrics` says what each one means."""

    RETRY = "retries"
    FAILOVER = "failovers"
    FAILURE = "failures"
    CORRUPT = "integrity_failures"
    CONNECT = "connects"
    BREAK = "breaks"
    REST = "rests"


@dataclass(slots=True, eq=False)
class PathStats:
    """Totals since the start of the process. Thread-safe."""

    transport: str
    rail: str
    peer: str
    meter: PeerMeter = field(default_factory=PeerMeter)
    """Of all paths to this peer."""
    read_bytes: int = 0
    written_bytes: int = 0
    num_in_flight: int = 0
    """Slices that a session carries."""
    bytes_in_flight: int = 0
    """Of all slices that were submitted to this path and have not ended."""
    latency_sum_s: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Slices that have ended well, by the bucket of their time."""
    incidents: Counter[Incident] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submitted(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_in_flight += nbytes
        self.meter.submitted(nbytes)

    def withdrawn(self, nbytes: int) -> None:
        """Whatever they ended in, they are not on this path any more."""
        with self._lock:
            self.bytes_in_flight -= nbytes
        self.meter.withdrawn(nbytes)

    def taken(self, num_slices: int = 1) -> None:
        """By a session; negative: given back."""
        with self._lock:
            self.num_in_flight += num_slices

    def arrived(self, op: Op, nbytes: int, seconds: float) -> None:
        """One slice; `seconds` since a session took it."""
        with self._lock:
            if op is Op.READ:
                self.read_bytes += nbytes
            else:
                self.written_bytes += nbytes
            self.latency_sum_s += seconds
            self.latency_counts[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.meter.arrived(op, nbytes, seconds)

    def count(self, incident: Incident) -> None:
        with self._lock:
            self.incidents[incident] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """What an engine holds at one moment."""

    num_segments: int
    segment_bytes: int
    num_windows: int
    num_served: int
    """Connections that peers have opened."""
    num_endpoints: int
    """Connections that it has opened."""


_MAX_PEERS = 4096
"""A label's values must not grow for ever; beyond it, new peers share one name."""


class TransferStats:
    """Of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, str, str], PathStats] = {}
        self._meters: dict[str, PeerMeter] = {}  # by peer

    def of(self, transport: str, rail: str, peer: str) -> PathStats:
        with self._lock:
            key = (transport, rail, peer)
            if key not in self._paths and len(self._paths) >= _MAX_PEERS:
                key = (transport, rail, "other")
            if key not in self._paths:
                meter = self._meters.setdefault(key[2], PeerMeter())
                self._paths[key] = PathStats(*key, meter)
            return self._paths[key]

    def seen(self) -> dict[str, Seen]:
        """By peer, what was measured of the bandwidth between it and this engine."""
        with self._lock:
            meters = dict(self._meters)
        return {peer: meter.seen() for peer, meter in meters.items()}

    def __iter__(self) -> Iterator[PathStats]:
        with self._lock:
            return iter(list(self._paths.values()))
