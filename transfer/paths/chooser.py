"""Which way a slice takes to one peer: the transport, the pair of rails, the stream.

Owns, for each path, the bytes in flight and the measured bandwidth. Its rules:

1. Only paths of the leading transport compete; the next transport is used when all paths of the
   better ones rest or were tried.
2. Among them the least (bytes in flight + bytes of the slice) ÷ bandwidth wins, times a penalty when
   the local rail is not near the memory; ties go to the first.
3. A path on trial after a rest carries one slice at a time until that one ends.
4. When everything rests, the path whose rest ends first is used rather than none.
5. A transport that measures less than half of the next one's bandwidth loses its place for five
   minutes, and is measured anew then. Both must have been measured: on retries and after failures
   anyway, and with `compare_every_s` by a few slices at that interval.

Pure: time is an argument. Not thread-safe. Knows no sockets and does not retry; who does passes in
`tried`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from transfer.address import Address, Rail
from transfer.paths.health import Condition, RailHealth
from transfer.paths.topology import Topology

NUMA_PENALTY = 1.5
"""Crossing sockets costs a third of the bandwidth or so; a near rail is preferred until it has half as
much again in flight."""

DEFAULT_BANDWIDTH = 1e9
"""Bytes per second, when nothing at all is known of a transport's paths. Only ratios matter."""

FAR_WORSE = 0.5
LOST_PLACE_S = 300.0
"""The longest rest of a rail, for the same reason: what was slow may have been repaired."""


@dataclass(frozen=True, slots=True)
class Path:
    """One of the ways to a peer. `stream` tells connections over the same pair of rails apart."""

    transport: str
    local: Rail
    remote: Rail
    stream: int

    def __hash__(
        self,
    ) -> int:  # on the way of every slice; the generated one hashes both rails whole
        return hash((self.transport, self.local.name, self.remote.endpoint, self.stream))

    @property
    def rails(self) -> Hashable:
        """What rests as a whole when it fails: this pair, whichever the stream."""
        return (self.transport, self.local.name, self.remote.endpoint)


@dataclass(slots=True, eq=False)
class _Track:
    """What is known of one path."""

    path: Path
    order: int
    rails: Hashable
    speed: Speed
    in_flight_bytes: int = 0
    in_flight_slices: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    """The paths of one transport."""

    transport: str
    tracks: list[_Track]
    speed: Speed
    """Of the transport as a whole: all its slices are measured as if they took one path."""
    lost_place_at: float | None = None


class PathChooser:
    """The paths between one engine and one peer."""

    def __init__(
        self,
        paths: Sequence[Path],
        topology: Topology,
        health: RailHealth,
        *,
        compare_every_s: float = math.inf,
    ) -> None:
        """`paths` in order of preference of their transports; at least one."""
        assert paths
        assert len(set(paths)) == len(paths)
        self._topology = topology
        self._health = health
        self._tracks = {
            path: _Track(path, order, path.rails, Speed(nominal=nominal_bandwidth(path)))
            for order, path in enumerate(paths)
        }
        names = dict.fromkeys(path.transport for path in paths)
        self._groups = [_grouped(self._tracks.values(), name) for name in names]
        self._group_of = {group.transport: group for group in self._groups}
        self._ranking = list(self._groups)
        self._only = paths[0] if len(paths) == 1 else None
        self._penalties: dict[str, list[float]] = {}
        self._compare_every_s = compare_every_s
        self._compare_at = math.inf
        """When the next comparison begins; known from the first choice on."""
        self._num_to_compare = 0
        """Slices that this comparison may still send over the next transport."""

    def choose(
        self, location: str, nbytes: int, now: float, tried: Collection[Path] = ()
    ) -> Path | None:
        """The path for a slice of `nbytes` from or to local memory at `location`; None: all are tried."""
        if self._only is not None:
            return None if self._only in tried else self._only
        if not tried and self._compares(nbytes, now):
            track = self._least_cost(self._ranking[1].tracks, location, nbytes, now, tried)
            if track is not None:
                return track.path
        for group in self._ranking:
            track = self._least_cost(group.tracks, location, nbytes, now, tried)
            if track is not None:
                return track.path
        return self._first_to_recover(now, tried)

    def sent(self, path: Path, nbytes: int) -> None:
        """A slice is on its way (or in the path's queue)."""
        track = self._tracks[path]
        track.in_flight_bytes += nbytes
        track.in_flight_slices += 1

    def done(self, path: Path, nbytes: int, seconds: float, now: float) -> None:
        """It arrived, `seconds` after it was sent."""
        track = self._ended(path, nbytes)
        if not self._health.all_healthy:
            self._health.succeeded(track.rails, now)
        track.speed.add(nbytes, seconds, now)
        if len(self._groups) > 1 and nbytes >= MEASURED_FROM:
            group = self._group_of[path.transport]
            if group.speed is not track.speed:
                group.speed.add(nbytes, seconds, now)
            self._rank(now)

    def failed(self, path: Path, nbytes: int, now: float) -> bool:
        """The path broke under it; True: its rails rest from now on. What the peer refused is no failure of the path:
        report `dropped`."""
        track = self._ended(path, nbytes)
        rests = self._health.failed(track.rails, now)
        if path.transport != self._ranking[0].transport:  # a comparison must not cost much
            self._num_to_compare = 0
            self._compare_at = max(self._compare_at, now + LOST_PLACE_S)
        return rests

    def dropped(self, path: Path, nbytes: int) -> None:
        """It left the path's queue without having been sent; says nothing about the path."""
        self._ended(path, nbytes)

    @property
    def transports(self) -> tuple[str, ...]:
        """In the order in which they are used now."""
        return tuple(group.transport for group in self._ranking)

    def validate(self) -> None:
        """Raises AssertionError when an account is impossible."""
        for track in self._tracks.values():
            assert track.in_flight_slices >= 0
            assert track.in_flight_bytes >= 0
            assert track.in_flight_slices or not track.in_flight_bytes
        assert sorted(self.transports) == sorted(group.transport for group in self._groups)
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
            candidates = [
                track for track in tracks if track.path not in tried and self._usable(track, now)
            ]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        bandwidths = _bandwidths(tracks, now)
        penalties = self._penalties_for(location)
        best, least = None, math.inf
        for track in candidates:
            queued = track.in_flight_bytes + nbytes
            cost = queued / bandwidths[track.order] * penalties[track.order]
            if cost < least:
                best, least = track, cost
        return best

    def _usable(self, track: _Track, now: float) -> bool:
        condition = self._health.condition(track.rails, now)
        if condition is Condition.TRIAL:
            return not any(other.in_flight_slices for other in self._same_rails(track))
        return condition is Condition.HEALTHY

    def _same_rails(self, track: _Track) -> Iterator[_Track]:
        tracks = self._group_of[track.path.transport].tracks
        return (other for other in tracks if other.rails == track.rails)

    def _first_to_recover(self, now: float, tried: Collection[Path]) -> Path | None:
        left = [track for track in self._tracks.values() if track.path not in tried]
        if not left:
            return None
        return min(left, key=lambda t: (self._health.rest_ends_at(t.rails) or now, t.order)).path

    def _penalties_for(self, location: str) -> list[float]:
        found = self._penalties.get(location)
        if found is None:
            found = self._penalties[location] = [
                1.0 if self._topology.prefers(location, path.local) else NUMA_PENALTY
                for path in self._tracks
            ]
        return found

    def _ended(self, path: Path, nbytes: int) -> _Track:
        track = self._tracks[path]
        track.in_flight_bytes -= nbytes
        track.in_flight_slices -= 1
        return track

    def _compares(self, nbytes: int, now: float) -> bool:
        """Whether this slice goes over the next transport, to measure it."""
        if self._compare_at == math.inf:
            self._compare_at = now + self._compare_every_s
        if now >= self._compare_at:
            self._compare_at = now + self._compare_every_s
            self._num_to_compare = SETTLED_SLICES
        if not self._num_to_compare or len(self._groups) == 1 or nbytes < MEASURED_FROM:
            return False
        self._num_to_compare -= 1
        return True

    def _rank(self, now: float) -> None:
        """Rule 5, for each transport and the one that follows it now."""
        for group in self._groups:
            if group.lost_place_at is not None and now - group.lost_place_at >= LOST_PLACE_S:
                group.lost_place_at = None
                group.speed.forget()
                self._ranking.sort(key=self._standing)
        for better, next_one in pairwise(self._ranking):
            if better.lost_place_at is None and _far_worse(better, next_one, now):
                better.lost_place_at = now
                self._ranking.sort(key=self._standing)
                return

    def _standing(self, group: _Group) -> tuple[bool, int]:
        """Those that lost their place come last, in the order of preference among themselves."""
        return group.lost_place_at is not None, group.tracks[0].order


def nominal_bandwidth(path: Path) -> float | None:
    """Of the slower end; None when neither end tells."""
    told = [rail.bandwidth_bytes_s for rail in (path.local, path.remote)]
    return min((bandwidth for bandwidth in told if bandwidth), default=None)


def _bandwidths(tracks: Sequence[_Track], now: float) -> dict[int, float]:
    """By order. What is neither measured nor told is taken to be as good as the best: it is tried."""
    known = {track.order: track.speed.bandwidth(now) for track in tracks}
    assumed = max((b for b in known.values() if b), default=DEFAULT_BANDWIDTH)
    return {order: bandwidth or assumed for order, bandwidth in known.items()}


def _grouped(tracks: Iterable[_Track], transport: str) -> _Group:
    members = [track for track in tracks if track.path.transport == transport]
    return _Group(transport, members, members[0].speed if len(members) == 1 else Speed())


def _far_worse(better: _Group, next_one: _Group, now: float) -> bool:
    ours = better.speed.settled(now - LOST_PLACE_S)
    theirs = next_one.speed.settled(now - LOST_PLACE_S)
    return ours is not None and theirs is not None and ours < FAR_WORSE * theirs


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


def paths_between(local_rails: Iterable[Rail], address: Address, streams: int) -> Iterable[Path]:
    """In order of preference. Rail i goes to the peer's rail i first; the other pairs follow, for when
    a rail at one end and another one at the other end are down."""
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
