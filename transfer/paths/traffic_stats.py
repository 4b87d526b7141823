"""Measured totals of the traffic between this engine and its peers: bandwidth per peer, counters per path.

A peer's bandwidth is measured in periods, over all its paths. A period begins when bytes are in flight and ends when
none are, or after a second. It counts if it moved enough bytes to measure a bandwidth rather than a round trip, in one
direction only, since two directions share the capacity. Thread-safe. `BandwidthMeter` knows no path and no rail.
"""

import bisect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from moonserve.transfer.paths.path_selection import MEASURED_FROM
from moonserve.transfer.transport_interface import Op

MAX_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthTotals:
    """Totals since the start. The seconds are the time in which these bytes were in flight."""

    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    written_s: float = 0.0


class BandwidthMeter:
    """Measures the bandwidth to one peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._in_flight = 0
        self._began_at = 0.0  # start of the period
        self._moved = {Op.READ: 0, Op.WRITE: 0}  # bytes in the period
        self._bytes = {Op.READ: 0, Op.WRITE: 0}
        self._seconds = {Op.READ: 0.0, Op.WRITE: 0.0}

    def submitted(self, nbytes: int) -> None:
        with self._lock:
            if not self._in_flight:
                self._begin()
            self._in_flight += nbytes

    def arrived(self, op: Op, nbytes: int, seconds: float) -> None:
        """Counts bytes that arrived. `seconds` is the slice's own time, used only if it was never submitted."""
        with self._lock:
            if self._in_flight:
                self._moved[op] += nbytes
            elif nbytes >= MEASURED_FROM:
                self._bytes[op] += nbytes
                self._seconds[op] += seconds

    def left(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight -= nbytes
            if not self._in_flight or self._clock() - self._began_at >= MAX_PERIOD_S:
                self._end()
                self._begin()

    def totals(self) -> BandwidthTotals:
        with self._lock:
            return BandwidthTotals(
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
    """Countable events; `metrics` describes each."""

    RETRY = "retries"
    FAILOVER = "failovers"
    FAILURE = "failures"
    CORRUPT = "integrity_failures"
    CONNECT = "connects"
    BREAK = "breaks"
    COOLDOWN = "rests"


@dataclass(slots=True, eq=False)
class PathStats:
    """Totals of one path since the start of the process. Thread-safe."""

    transport: str
    rail: str
    peer: str
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)
    """The peer's meter, shared by all paths to it."""
    read_bytes: int = 0
    written_bytes: int = 0
    num_in_flight: int = 0
    """Slices carried by a session."""
    bytes_in_flight: int = 0
    """Bytes of all slices that were submitted to this path and have not ended."""
    latency_sum_s: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Slices that succeeded, by latency bucket."""
    incidents: Counter[Incident] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submitted(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_in_flight += nbytes
        self.meter.submitted(nbytes)

    def left(self, nbytes: int) -> None:
        """Counts bytes that left this path, whatever their outcome."""
        with self._lock:
            self.bytes_in_flight -= nbytes
        self.meter.left(nbytes)

    def taken(self, num_slices: int = 1) -> None:
        """Counts slices that a session took; negative for slices that ended or were given back."""
        with self._lock:
            self.num_in_flight += num_slices

    def arrived(self, op: Op, nbytes: int, seconds: float) -> None:
        """Counts one slice that arrived `seconds` after a session took it."""
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
    """Resources that an engine holds at one moment."""

    num_segments: int
    segment_bytes: int
    num_windows: int
    num_served: int
    """Connections opened by peers."""
    num_endpoints: int
    """Connections opened by this engine."""


_MAX_PATHS = 4096
"""Limit of paths with statistics of their own, since label values must not grow without bound. Beyond it new peers
share the name "other"."""


class TransferStats:
    """Statistics of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, str, str], PathStats] = {}
        self._meters: dict[str, BandwidthMeter] = {}

    def for_path(self, transport: str, rail: str, peer: str) -> PathStats:
        with self._lock:
            key = (transport, rail, peer)
            if key not in self._paths and len(self._paths) >= _MAX_PATHS:
                key = (transport, rail, "other")
            if key not in self._paths:
                meter = self._meters.setdefault(key[2], BandwidthMeter())
                self._paths[key] = PathStats(*key, meter)
            return self._paths[key]

    def bandwidth_totals(self) -> dict[str, BandwidthTotals]:
        """Returns the measured bandwidth totals by peer."""
        with self._lock:
            meters = dict(self._meters)
        return {peer: meter.totals() for peer, meter in meters.items()}

    def __iter__(self) -> Iterator[PathStats]:
        with self._lock:
            return iter(list(self._paths.values()))
