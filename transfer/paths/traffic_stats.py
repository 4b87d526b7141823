"""Measured totals of the traffic between this engine and its peers: bandwidth per peer, counters per path.

A peer's bandwidth is measured in periods, over all its paths. A period begins when bytes are in flight and ends when
none are, or after a second. It counts if it moved enough bytes to measure a bandwidth rather than a round trip, in one
direction only, since two directions share the capacity. Thread-safe: native code counts (native/traffic.h).
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from moonserve.protocol.process.native_libraries import c_fields
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.transport_interface import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthTotals:
    """Totals since the start. The seconds are the time in which these bytes were in flight."""

    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    written_s: float = 0.0


class BandwidthMeter(ctypes.Structure):
    """Bandwidth to one peer, measured by native code. `Meter` of traffic.h; an array has one entry per `Op`."""

    _fields_ = (
        ("in_flight", ctypes.c_int64),
        *c_fields(ctypes.c_int64 * 2, "moved bytes inline_ns"),
        ("began_at", ctypes.c_double),
        ("seconds", ctypes.c_double * 2),
    )

    def totals(self) -> BandwidthTotals:
        read, written = self.bytes
        read_s, written_s = (seconds + ns / 1e9 for seconds, ns in zip(self.seconds, self.inline_ns, strict=True))
        return BandwidthTotals(read_bytes=read, read_s=read_s, written_bytes=written, written_s=written_s)


BUCKETS_S = (50e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 50e-3, 250e-3, 1.0, 5.0)
"""Upper bounds of the latency histogram: one slice, from being handed to a session to its end."""


class PathTotals(ctypes.Structure):
    """Totals of one path since the start of the process. `Path` of traffic.h."""

    _fields_ = (
        ("meter", ctypes.c_void_p),
        *c_fields(ctypes.c_int64, "num_in_flight bytes_in_flight"),
        ("bytes", ctypes.c_int64 * 2),
        ("sum_ns", ctypes.c_int64),
        ("counts", ctypes.c_int64 * (len(BUCKETS_S) + 1)),
    )
    num_in_flight: int
    """Slices carried by a session."""
    bytes_in_flight: int
    """Bytes of all slices that were submitted to this path and have not ended."""


class Incident(StrEnum):
    """Countable events; `metrics` describes each."""

    RETRY = "retries"
    FAILOVER = "failovers"
    FAILURE = "failures"
    CORRUPT = "integrity_failures"
    CONNECT = "connects"
    BREAK = "breaks"
    COOLDOWN = "rests"


class PathStats:
    """Statistics of one path. Thread-safe."""

    def __init__(
        self, transport: str, rail: str, peer: str, meter: BandwidthMeter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`meter` is the peer's, shared by all paths to it."""
        self.transport, self.rail, self.peer, self.meter = transport, rail, peer, meter
        self.totals = PathTotals(meter=ctypes.addressof(meter))
        self.native = ctypes.addressof(self.totals)
        self.incidents: Counter[Incident] = Counter()
        self._clock = clock
        self._plane = data_plane().brief
        self._lock = threading.Lock()

    def submitted(self, nbytes: int) -> None:
        self._plane.path_submitted(self.native, nbytes, self._clock())

    def left(self, nbytes: int) -> None:
        """Counts bytes that left this path, whatever their outcome."""
        self._plane.path_left(self.native, nbytes, self._clock())

    def taken(self, num_slices: int = 1) -> None:
        """Counts slices that a session took; negative for slices that ended or were given back."""
        self._plane.path_taken(self.native, num_slices)

    def arrived(self, op: Op, nbytes: int, seconds: float) -> None:
        """Counts one slice that arrived `seconds` after a session took it."""
        self._plane.path_arrived(self.native, op is Op.WRITE, nbytes, seconds)

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
