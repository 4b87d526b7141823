"""What moved, how fast and what went wrong, per transport, rail and peer.

Several threads count on one path: callers who submit, the lanes' own, and lanes that share a label.
`transfer.metrics` reads when somebody asks. Knows no Prometheus.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from transfer.base import Op
from transfer.seen import PeerMeter, Seen

BUCKETS_S = (50e-6, 100e-6, 250e-6, 1e-3, 2.5e-3, 10e-3, 50e-3, 250e-3, 1.0, 5.0)
"""Upper bounds of the latency histogram: one slice, from being handed to a session to its end."""


class Incident(StrEnum):
    """What is counted one by one."""

    RETRY = "retries"
    """A slice was sent again, here or elsewhere, after it failed here."""
    FAILOVER = "failovers"
    """Of these, it went another way."""
    FAILURE = "failures"
    """A slice failed for good, other than by being cancelled."""
    CORRUPT = "integrity_failures"
    """A slice arrived with another checksum."""
    CONNECT = "connects"
    BREAK = "breaks"
    """A session ended with work under way, or could not be had."""
    REST = "rests"
    """The rail was left alone for a while after errors."""


class PathStats:
    """Totals since the start of the process. Thread-safe."""

    __slots__ = (
        "_lock",
        "bytes_in_flight",
        "incidents",
        "latency_counts",
        "latency_sum_s",
        "meter",
        "num_in_flight",
        "peer",
        "rail",
        "read_bytes",
        "transport",
        "written_bytes",
    )

    def __init__(
        self, transport: str, rail: str, peer: str, meter: PeerMeter | None = None
    ) -> None:
        """`meter`: of all paths to this peer."""
        self._lock = threading.Lock()
        self.meter = meter or PeerMeter()
        self.transport = transport
        self.rail = rail
        self.peer = peer
        self.read_bytes = 0
        self.written_bytes = 0
        self.num_in_flight = 0
        """Slices that a session carries."""
        self.bytes_in_flight = 0
        """Of all slices that were submitted to this path and have not ended."""
        self.latency_sum_s = 0.0
        self.latency_counts = [0] * (len(BUCKETS_S) + 1)
        self.incidents: Counter[Incident] = Counter()

    @property
    def num_slices(self) -> int:
        """That have ended well."""
        return sum(self.latency_counts)

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
