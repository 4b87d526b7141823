"""Chooses the path of a slice to one peer: the transport, the pair of rails and the stream.

Owns, for each path, the bytes in flight and the measured bandwidth. Its rules:

1. Only paths of one transport compete. The next transport is used if all paths of the better ones cool down or were
   tried.
2. Among them the least (bytes in flight + bytes of the slice) ÷ bandwidth wins, times a penalty if the local rail is
   not near the memory. Ties go to the first.
3. A path on trial after a cooldown carries one slice at a time until that slice ends.
4. If everything cools down, the path whose cooldown ends first is used rather than none.

Pure: time is an argument. Not thread-safe. Knows no sockets and does not retry; a retrying caller passes `tried`.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.paths.rail_health import RailCondition, RailHealth
from moonserve.transfer.paths.topology import Topology

NUMA_PENALTY = 1.5
"""Crossing sockets costs about a third of the bandwidth. A near rail is preferred until it has half as much again in
flight."""

DEFAULT_BANDWIDTH = 1e9
"""Bytes per second, if nothing is known of a transport's paths. Only ratios matter."""


@dataclass(frozen=True, slots=True)
class TransferPath:
    """One path to a peer. `stream` distinguishes connections over the same pair of rails."""

    transport: str
    local: Rail
    remote: Rail
    stream: int

    def __hash__(self) -> int:  # called for every slice; the generated one hashes both rails whole
        return hash((self.transport, self.local.name, self.remote.endpoint, self.stream))

    @property
    def rails(self) -> Hashable:
        """The pair of rails, which cools down as a whole after failures, whatever the stream."""
        return (self.transport, self.local.name, self.remote.endpoint)


@dataclass(slots=True, eq=False)
class _PathState:
    """State of one path."""

    path: TransferPath
    rails: Hashable
    estimate: "BandwidthEstimate"
    in_flight_bytes: int = 0
    in_flight_slices: int = 0


class PathSelector:
    """Chooses among the paths between one engine and one peer."""

    def __init__(self, paths: Sequence[TransferPath], topology: Topology, health: RailHealth) -> None:
        """Takes at least one path, in order of preference of the transports."""
        assert paths
        self._topology = topology
        self._health = health
        self._states: dict[TransferPath, _PathState] = {}
        self._by_transport: dict[str, list[_PathState]] = {}
        self.add(paths)

    def add(self, paths: Iterable[TransferPath]) -> int:
        """Adds paths and returns how many of them are new."""
        before = len(self._states)
        for path in paths:
            if path not in self._states:
                state = _PathState(path, path.rails, BandwidthEstimate(nominal_bandwidth(path)))
                self._states[path] = state
                self._by_transport.setdefault(path.transport, []).append(state)
        self._only = next(iter(self._states)) if len(self._states) == 1 else None
        return len(self._states) - before

    def choose(
        self, location: str, nbytes: int, now: float, tried: Collection[TransferPath] = ()
    ) -> TransferPath | None:
        """Returns the path for a slice of `nbytes` from or to local memory at `location`, or None if all were tried."""
        if self._only is not None:
            return None if self._only in tried else self._only
        for states in self._by_transport.values():
            state = self._least_cost(states, location, nbytes, now, tried)
            if state is not None:
                return state.path
        return self._first_to_recover(now, tried)

    def sent(self, path: TransferPath, nbytes: int) -> None:
        """Counts a slice as sent on the path or queued for it."""
        state = self._states[path]
        state.in_flight_bytes += nbytes
        state.in_flight_slices += 1

    def done(self, path: TransferPath, nbytes: int, seconds: float, now: float) -> None:
        """Counts a slice as arrived, `seconds` after it was sent."""
        state = self._ended(path, nbytes)
        if not self._health.all_healthy:
            self._health.succeeded(state.rails, now)
        state.estimate.add(nbytes, seconds, now)

    def failed(self, path: TransferPath, nbytes: int, now: float) -> bool:
        """Counts a slice whose path broke and returns True if the path's rails cool down from now on. A refusal by
        the peer is not a failure of the path: report it with `dropped`."""
        return self._health.failed(self._ended(path, nbytes).rails, now)

    def dropped(self, path: TransferPath, nbytes: int) -> None:
        """Counts a slice that left the path's queue for a reason that says nothing about the path."""
        self._ended(path, nbytes)

    def validate(self) -> None:
        """Checks the counters. Raises AssertionError if they are inconsistent."""
        for state in self._states.values():
            assert state.in_flight_slices >= 0
            assert state.in_flight_bytes >= 0
            assert state.in_flight_slices or not state.in_flight_bytes
        self._health.validate()

    def _least_cost(
        self,
        states: Sequence[_PathState],
        location: str,
        nbytes: int,
        now: float,
        tried: Collection[TransferPath],
    ) -> _PathState | None:
        candidates = states
        if tried or not self._health.all_healthy:
            candidates = [state for state in states if state.path not in tried and self._usable(state, now)]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # A path without measured or nominal bandwidth is assumed to be as fast as the best, so that it is tried.
        known = [state.estimate.bandwidth(now) for state in states]
        assumed = max(filter(None, known), default=DEFAULT_BANDWIDTH)

        def cost(state: _PathState) -> float:
            is_near = self._topology.prefers(location, state.path.local)
            queued = (state.in_flight_bytes + nbytes) * (1.0 if is_near else NUMA_PENALTY)
            return queued / (state.estimate.bandwidth(now) or assumed)

        return min(candidates, key=cost)

    def _usable(self, state: _PathState, now: float) -> bool:
        condition = self._health.condition(state.rails, now)
        if condition is RailCondition.TRIAL:
            others = self._by_transport[state.path.transport]
            return not any(each.in_flight_slices for each in others if each.rails == state.rails)
        return condition is RailCondition.HEALTHY

    def _first_to_recover(self, now: float, tried: Collection[TransferPath]) -> TransferPath | None:
        left = [state for state in self._states.values() if state.path not in tried]
        if not left:
            return None
        return min(left, key=lambda state: self._health.cooldown_ends_at(state.rails) or now).path

    def _ended(self, path: TransferPath, nbytes: int) -> _PathState:
        state = self._states[path]
        state.in_flight_bytes -= nbytes
        state.in_flight_slices -= 1
        return state


def nominal_bandwidth(path: TransferPath) -> float | None:
    """Returns the bandwidth of the slower end; None if neither end reports one."""
    known = [rail.bandwidth_bytes_s for rail in (path.local, path.remote)]
    return min((bandwidth for bandwidth in known if bandwidth), default=None)


MEASURED_FROM = 64 << 10
"""Bytes. A smaller slice is mostly latency over any transport."""

_DECAY = 0.9
"""Weight of the past at each slice; it halves after 7 slices."""

_STALE_S = 10.0
"""Age at which a measurement expires. The path may have recovered, so its nominal value is assumed."""


class BandwidthEstimate:
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
        self._bytes = self._bytes * _DECAY + nbytes
        self._busy_s = self._busy_s * _DECAY + max(0.0, busy_s)
        self._measured_at = now

    def bandwidth(self, now: float) -> float | None:
        """Returns bytes per second: recently measured, else nominal, else None."""
        if self._busy_s > 0.0 and now - self._measured_at <= _STALE_S:
            return self._bytes / self._busy_s
        return self._nominal


_LONG_ROUND_TRIP_S = 2e-3
"""Longer than a round trip within a data center, where one connection fills the link."""
_LONG_STREAMS = 4
"""TCP connections over a long round trip, where losses and the kernel's send buffer limit one (docs/networks.md)."""


def streams_for(round_trip_s: float | None) -> int:
    """Returns the number of TCP connections to use between a pair of rails."""
    return 1 if round_trip_s is None or round_trip_s < _LONG_ROUND_TRIP_S else _LONG_STREAMS


def paths_between(local_rails: Iterable[Rail], address: Address, streams: int) -> Iterable[TransferPath]:
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
                    yield TransferPath(transport, local, remote, stream)
