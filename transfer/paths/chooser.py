"""Chooses the path of a slice to one peer: the transport, the pair of rails and the stream.

Owns, for each path, the bytes in flight and the measured bandwidth. Its rules:

1. Only paths of one transport compete. The next transport is used if all paths of the better ones rest or were tried.
2. Among them the least (bytes in flight + bytes of the slice) ÷ bandwidth wins, times a penalty if the local rail is
   not near the memory. Ties go to the first.
3. A path on trial after a rest carries one slice at a time until that slice ends.
4. If everything rests, the path whose rest ends first is used rather than none.

Pure: time is an argument. Not thread-safe. Knows no sockets and does not retry; a retrying caller passes `tried`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from transfer.address import Address, Rail
from transfer.paths.health import Condition, RailHealth
from transfer.paths.topology import Topology

NUMA_PENALTY = 1.5
"""Crossing sockets costs about a third of the bandwidth. A near rail is preferred until it has half as much again in
flight."""

DEFAULT_BANDWIDTH = 1e9
"""Bytes per second, if nothing is known of a transport's paths. Only ratios matter."""


@dataclass(frozen=True, slots=True)
class Path:
    """One path to a peer. `stream` distinguishes connections over the same pair of rails."""

    transport: str
    local: Rail
    remote: Rail
    stream: int

    def __hash__(
        self,
    ) -> int:  # called for every slice; the generated one hashes both rails whole
        return hash((self.transport, self.local.name, self.remote.endpoint, self.stream))

    @property
    def rails(self) -> Hashable:
        """The pair of rails, which rests as a whole after failures, whatever the stream."""
        return (self.transport, self.local.name, self.remote.endpoint)


@dataclass(slots=True, eq=False)
class _Track:
    """State of one path."""

    path: Path
    rails: Hashable
    speed: Speed
    in_flight_bytes: int = 0
    in_flight_slices: int = 0


class PathChooser:
    """Chooses among the paths between one engine and one peer."""

    def __init__(self, paths: Sequence[Path], topology: Topology, health: RailHealth) -> None:
        """Takes at least one path, in order of preference of the transports."""
        assert paths
        assert len(set(paths)) == len(paths)
        self._topology = topology
        self._health = health
        self._tracks = {path: _Track(path, path.rails, Speed(nominal_bandwidth(path))) for path in paths}
        names = dict.fromkeys(path.transport for path in paths)
        self._by_transport = {
            name: [track for track in self._tracks.values() if track.path.transport == name] for name in names
        }
        self._only = paths[0] if len(paths) == 1 else None

    def choose(self, location: str, nbytes: int, now: float, tried: Collection[Path] = ()) -> Path | None:
        """Returns the path for a slice of `nbytes` from or to local memory at `location`, or None if all were tried."""
        if self._only is not None:
            return None if self._only in tried else self._only
        for tracks in self._by_transport.values():
            track = self._least_cost(tracks, location, nbytes, now, tried)
            if track is not None:
                return track.path
        return self._first_to_recover(now, tried)

    def sent(self, path: Path, nbytes: int) -> None:
        """Counts a slice as sent on the path or queued for it."""
        track = self._tracks[path]
        track.in_flight_bytes += nbytes
        track.in_flight_slices += 1

    def done(self, path: Path, nbytes: int, seconds: float, now: float) -> None:
        """Counts a slice as arrived, `seconds` after it was sent."""
        track = self._ended(path, nbytes)
        if not self._health.all_healthy:
            self._health.succeeded(track.rails, now)
        track.speed.add(nbytes, seconds, now)

    def failed(self, path: Path, nbytes: int, now: float) -> bool:
        """Counts a slice whose path broke and returns True if the path's rails rest from now on. A refusal by the peer
        is not a failure of the path: report it with `dropped`."""
        return self._health.failed(self._ended(path, nbytes).rails, now)

    def dropped(self, path: Path, nbytes: int) -> None:
        """Counts a slice that left the path's queue for a reason that says nothing about the path."""
        self._ended(path, nbytes)

    def validate(self) -> None:
        """Checks the counters. Raises AssertionError if they are inconsistent."""
        for track in self._tracks.values():
            assert track.in_flight_slices >= 0
            assert track.in_flight_bytes >= 0
            assert track.in_flight_slices or not track.in_flight_bytes
        self._health.validate()

    def _least_cost(
        self,
        tracks: Sequence[_Track],
        location: str,
        nbytes: int,
        now: float,
        tried: Collection[Path],
    ) -> _Track | None:
        candidates = tracks
        if tried or not self._health.all_healthy:
            candidates = [track for track in tracks if track.path not in tried and self._usable(track, now)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # A path without measured or nominal bandwidth is assumed to be as fast as the best, so that it is tried.
        known = [track.speed.bandwidth(now) for track in tracks]
        assumed = max(filter(None, known), default=DEFAULT_BANDWIDTH)

        def cost(track: _Track) -> float:
            is_near = self._topology.prefers(location, track.path.local)
            queued = (track.in_flight_bytes + nbytes) * (1.0 if is_near else NUMA_PENALTY)
            return queued / (track.speed.bandwidth(now) or assumed)

        return min(candidates, key=cost)

    def _usable(self, track: _Track, now: float) -> bool:
        condition = self._health.condition(track.rails, now)
        if condition is Condition.TRIAL:
            others = self._by_transport[track.path.transport]
            return not any(each.in_flight_slices for each in others if each.rails == track.rails)
        return condition is Condition.HEALTHY

    def _first_to_recover(self, now: float, tried: Collection[Path]) -> Path | None:
        left = [track for track in self._tracks.values() if track.path not in tried]
        if not left:
            return None
        return min(left, key=lambda track: self._health.rest_ends_at(track.rails) or now).path

    def _ended(self, path: Path, nbytes: int) -> _Track:
        track = self._tracks[path]
        track.in_flight_bytes -= nbytes
        track.in_flight_slices -= 1
        return track


def nominal_bandwidth(path: Path) -> float | None:
    """Returns the bandwidth of the slower end; None if neither end reports one."""
    told = [rail.bandwidth_bytes_s for rail in (path.local, path.remote)]
    return min((bandwidth for bandwidth in told if bandwidth), default=None)


MEASURED_FROM = 64 << 10
"""Bytes. A smaller slice is mostly latency over any transport."""

_KEEP = 0.9
"""Weight of the past at each slice; it halves after 7 slices."""

_STALE_S = 10.0
"""Age at which a measurement expires. The path may have recovered, so its nominal value is assumed."""


class Speed:
    """Exponentially weighted mean of bandwidth that starts from a nominal value."""

    __slots__ = ("_busy_s", "_bytes", "_ended_at", "_measured_at", "_nominal")

    def __init__(self, nominal: float | None = None) -> None:
        self._nominal = nominal
        self._bytes = self._busy_s = 0.0
        self._ended_at = self._measured_at = -math.inf

    def add(self, nbytes: int, seconds: float, now: float) -> None:
        """Adds a slice that ended at `now`, `seconds` after it was sent."""
        busy_s = min(seconds, now - self._ended_at)
        self._ended_at = now
        if nbytes < MEASURED_FROM:
            return
        if now - self._measured_at > _STALE_S:
            self._bytes = self._busy_s = 0.0
        self._bytes = self._bytes * _KEEP + nbytes
        self._busy_s = self._busy_s * _KEEP + max(0.0, busy_s)
        self._measured_at = now

    def bandwidth(self, now: float) -> float | None:
        """Returns bytes per second: recently measured, else nominal, else None."""
        if self._busy_s > 0.0 and now - self._measured_at <= _STALE_S:
            return self._bytes / self._busy_s
        return self._nominal


def paths_between(local_rails: Iterable[Rail], address: Address, streams: int) -> Iterable[Path]:
    """Yields paths in order of preference. Rail i is first paired with the peer's rail i. The other pairs follow, for
    when different rails are down at the two ends."""
    by_transport: dict[str, list[Rail]] = {}
    for rail in local_rails:
        by_transport.setdefault(rail.transport, []).append(rail)
    for transport, mine in by_transport.items():
        theirs = address.rails.get(transport, ())
        for distance in range(len(theirs)):
            for index, local in enumerate(mine):
                remote = theirs[(index + distance) % len(theirs)]
                for stream in range(streams if transport == "tcp" else 1):
                    yield Path(transport, local, remote, stream)
