"""One peer as the initiator sees it: the paths to it, their lanes, and retries.

Its rule: a part ends once. It is tried on every path, in up to two rounds, until a path carries it, its deadline
passes, or the peer refuses it. A WRITE is sent again only after the target has ended the connection that may still be
storing its first copy. If the first WRITE failed for good, the same holds for WRITEs of later batches.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from moonserve.protocol.errors import Cancelled, Incompatible, IntegrityError, MoonserveError, PeerLost, Unauthenticated
from moonserve.transfer.batch import Job, Part
from moonserve.transfer.config import FaultPlan
from moonserve.transfer.paths.connection_pool import ConnectionPool, UnfencedConnections
from moonserve.transfer.paths.lane import Lane
from moonserve.transfer.paths.lane_queue import Group
from moonserve.transfer.paths.path_selection import PathSelector, TransferPath, paths_between, streams_for
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.paths.rail_health import RailHealth
from moonserve.transfer.paths.topology import Topology
from moonserve.transfer.paths.traffic_stats import Incident, TransferStats
from moonserve.transfer.transport_interface import Op, Session, Slice

_log = logging.getLogger(__name__)

_ROUNDS = 2
"""Rounds over all paths. The connection that broke may have been an old one, so each path is dialled again once."""
_MAX_CORRUPT = 3
"""Attempts at a slice that keeps arriving with a wrong checksum."""
_NOT_RETRYABLE = (Unauthenticated, Incompatible)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """Dependencies that all peers of one engine share."""

    connect: Callable[[Address, TransferPath, float, Callable[[], None]], Session]
    topology: Topology
    stats: TransferStats
    faults: FaultPlan
    streams: int | None
    endpoints: ConnectionPool
    unfenced: UnfencedConnections


class Peer:
    """Schedules parts over the paths to one peer. All methods are thread-safe. Only `with_session`, `run_inline` and
    `join` block."""

    def __init__(self, address: Address, local_rails: Iterable[Rail], context: PeerContext) -> None:
        """Creates the paths to the peer; connects nothing. Raises PeerLost if no transport is in common."""
        self.address = address
        self.label = address.name or address.instance.hex()[:8]
        self.used_at = time.monotonic()
        self._context = context
        self._lock = threading.Lock()
        paths = list(paths_between(local_rails, address, context.streams or 1))
        if not paths:
            raise PeerLost("this process and the peer have no transport in common", peer=self.label)
        self.transports = tuple(dict.fromkeys(path.transport for path in paths))
        self._num_paths = len(paths)
        self._selector = PathSelector(paths, context.topology, RailHealth())
        self._lanes: dict[TransferPath, Lane] = {}
        self.shm_lane: Lane | None = None
        """The shm lane, whose session may read this host's memory directly."""
        self._retired: list[Lane] = []
        self._forgotten = False

    @property
    def idle(self) -> bool:
        return not self._lanes

    def run_inline(self, single: Slice) -> bool:
        """Carries a slice in the caller's thread. Returns False if that did not happen: then plan it and `put` it.

        Raises the peer's refusal.
        """
        began = time.monotonic()
        lane = self.shm_lane or self._idle_lane(single, began)
        if lane is None or (single.op is Op.WRITE and self._context.unfenced.at(self.address.instance)):
            return False
        if self._num_paths > 1:  # leaves time for another path
            single.deadline_at -= (single.deadline_at - began) / 2
        if not lane.run_inline(single):
            return False
        lane.stats.arrived(single.op, single.nbytes, time.monotonic() - began)
        return True

    def _idle_lane(self, single: Slice, now: float) -> Lane | None:
        with self._lock:
            path = self._selector.choose(single.local.location, single.nbytes, now)
            return None if path is None else self._lanes.get(path)

    def with_session(self, work: Callable[[Session, float], T], deadline_at: float) -> T:
        """Runs `work(session, deadline_at)` on a path, or on another one after PeerLost. Blocks. Raises the last
        PeerLost."""
        tried: list[TransferPath] = []
        lost: MoonserveError = PeerLost("the peer was dropped", peer=self.label)
        while True:
            now = time.monotonic()
            with self._lock:
                path = self._selector.choose("", 0, now, tried)
                if path is None or self._forgotten:
                    raise lost
                lane = self._lane(path)
                lane.num_callers += 1
            tried.append(path)
            others_left = len(tried) < self._num_paths
            try:
                return lane.with_session(work, now + (deadline_at - now) / (2 if others_left else 1))
            except PeerLost as error:
                lost = error
            finally:
                with self._lock:
                    lane.num_callers -= 1

    @property
    def stopped(self) -> bool:
        """True if no thread of this peer runs."""
        return not any(lane.thread.is_alive() for lane in [*self._lanes.values(), *self._retired])

    def forget(self) -> None:
        with self._lock:
            self._forgotten = True
            lanes = [*self._lanes.values(), *self._retired]
        for lane in lanes:
            lane.forget()

    def join(self) -> None:
        for lane in [*self._lanes.values(), *self._retired]:
            lane.thread.join()

    # LaneListener.

    def on_arrived(self, lane: Lane, part: Part, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._selector.done(lane.path, part.nbytes, seconds, now)
        lane.stats.arrived(part.op, part.nbytes, now - part.taken_at)
        lane.stats.left(part.nbytes)
        part.job.settle(part, None)

    def on_refused(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        if isinstance(error, IntegrityError):
            self._corrupt(lane, part, error)
        else:
            self._count_left(lane, part)
            self._fail(lane, part, error)

    def _corrupt(self, lane: Lane, part: Part, error: IntegrityError) -> None:
        """Retries a corrupt part, on another path first, since the rail is presumed faulty."""
        self._failed_on(lane, (part,), error)
        lane.stats.count(Incident.CORRUPT)
        part.num_corrupt += 1
        _log.warning("a slice arrived corrupt over %s: %s", lane.path.local.name, error)
        overdue = part.job.cancelled or time.monotonic() >= part.deadline_at
        if part.num_corrupt >= _MAX_CORRUPT or overdue:
            self._fail(lane, part, error)
            return
        part.tried.append(lane.path)
        if len(part.tried) >= self._num_paths:
            part.tried.clear()
        lane.stats.count(Incident.RETRY)
        self.put(part.job, (part,), failed_on=lane, error=error)

    def on_lost(self, lane: Lane, parts: Sequence[Part], error: MoonserveError, *, connected: bool) -> None:
        self._failed_on(lane, parts, error)
        for part in parts:
            part.tried.append(lane.path)
            self._retry(lane, part, error, connected)

    def _failed_on(self, lane: Lane, parts: Sequence[Part], error: MoonserveError) -> None:
        now = time.monotonic()
        with self._lock:
            rested = [self._selector.failed(lane.path, part.nbytes, now) for part in parts]
        lane.stats.left(sum(part.nbytes for part in parts))
        if any(rested):
            lane.stats.count(Incident.COOLDOWN)
            _log.warning("rail %s to %s cools down: %s", lane.path.local.name, self.label, error)

    def on_ended(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        self._count_left(lane, part)
        self._fail(lane, part, error)

    def on_unfenced(self, connection_id: int) -> None:
        self._context.unfenced.add(self.address.instance, (connection_id,))

    def on_fenced(self, connection_ids: Iterable[int]) -> None:
        self._context.unfenced.remove(self.address.instance, connection_ids)

    def on_opened(self, lane: Lane) -> None:
        self._context.endpoints.opened(lane)

    def on_closed(self, lane: Lane) -> None:
        self._context.endpoints.closed(lane)

    def on_idle(self) -> None:
        self._context.endpoints.trim()

    def may_retire(self, lane: Lane) -> bool:
        with self._lock:
            if lane.num_callers or not lane.idle:
                return False
            if self._lanes.get(lane.path) is lane:
                del self._lanes[lane.path]
                if lane is self.shm_lane:
                    self.shm_lane = None
                self._retired = [old for old in self._retired if old.thread.is_alive()] + [lane]
        return True

    def _retry(self, lane: Lane, part: Part, error: MoonserveError, connected: bool) -> None:
        overdue = time.monotonic() >= part.deadline_at
        if overdue or self._forgotten or part.job.cancelled or isinstance(error, _NOT_RETRYABLE):
            self._fail(lane, part, error)
            return
        if len(part.tried) >= self._num_paths:
            part.rounds += 1
            part.tried.clear()
            if part.rounds >= _ROUNDS or not connected:
                self._fail(lane, part, error)
                return
        lane.stats.count(Incident.RETRY)
        self.put(part.job, (part,), failed_on=lane, error=error)

    def _fail(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        if not isinstance(error, Cancelled):
            lane.stats.count(Incident.FAILURE)
        if part.fences:
            self._context.unfenced.add(self.address.instance, part.fences)
        part.job.settle(part, error)

    def _count_left(self, lane: Lane, part: Part) -> None:
        with self._lock:
            self._selector.dropped(lane.path, part.nbytes)
        lane.stats.left(part.nbytes)

    def put(
        self, job: Job, parts: Sequence[Part], *, failed_on: Lane | None = None, error: MoonserveError | None = None
    ) -> None:
        """Puts each part into the queue of the path that currently suits it best."""
        groups: dict[Lane, list[Part]] = {}
        refused: list[tuple[Part, MoonserveError]] = []
        now = time.monotonic()
        with self._lock:
            self.used_at = now
            for part in parts:
                try:
                    groups.setdefault(self._lane_for(part, now), []).append(part)
                except PeerLost as nowhere:
                    refused.append((part, error or nowhere))
            for lane, chosen in groups.items():
                self._context.endpoints.used(lane)
                lane.stats.submitted(sum(part.nbytes for part in chosen))
                lane.put(Group(job, chosen))
        if failed_on is not None and groups and failed_on not in groups:
            failed_on.stats.count(Incident.FAILOVER)
        for part, why in refused:
            if failed_on is not None:
                self._fail(failed_on, part, why)
            else:  # it was never sent
                job.settle(part, why)

    def _lane_for(self, part: Part, now: float) -> Lane:
        """Returns the lane for a part and counts the part as sent there. The lock is held. Raises PeerLost."""
        path = self._choose(part, now)
        if path is None:
            raise PeerLost("the peer was dropped", peer=self.label)
        try:
            return self._lane(path)
        except PeerLost:
            self._selector.dropped(path, part.nbytes)
            raise

    def _choose(self, part: Part, now: float) -> TransferPath | None:
        """Returns the path for a part and counts the part as sent there. The lock is held."""
        if self._forgotten:
            return None
        path = self._selector.choose(part.local.location, part.nbytes, now, part.tried)
        if path is not None:
            self._selector.sent(path, part.nbytes)
            part.has_alternative = self._num_paths - len(part.tried) > 1
            if part.op is Op.WRITE and (left := self._context.unfenced.at(self.address.instance)):
                part.fences += set(left).difference(part.fences)
        return path

    def _lane(self, path: TransferPath) -> Lane:
        """Returns the path's lane, creating it if needed. The lock is held. Raises PeerLost if no thread can be
        started."""
        lane = self._lanes.get(path)
        if lane is None:
            stats = self._context.stats.for_path(path.transport, path.local.name, self.label)
            try:
                lane = self._lanes[path] = Lane(path, listener=self, stats=stats, faults=self._context.faults)
            except RuntimeError as error:
                raise PeerLost(f"cannot start a thread for another connection: {error}", peer=self.label) from error
            if path.transport == "shm":
                self.shm_lane = lane
        return lane

    def connect(self, path: TransferPath, deadline_at: float, while_waiting: Callable[[], None]) -> Session:
        try:
            session = self._context.connect(self.address, path, deadline_at, while_waiting)
        except OSError as error:
            raise PeerLost(f"cannot connect: {error}", peer=self.label) from error
        if self._context.streams is None and path.transport == "tcp":
            self._add_streams(path, session.round_trip_s())
        return session

    def _add_streams(self, path: TransferPath, round_trip_s: float | None) -> None:
        """Adds paths over the same rails if a connection shows that they are far apart. The next parts use them."""
        paths = [replace(path, stream=stream) for stream in range(streams_for(round_trip_s))]
        with self._lock:
            num_added = self._selector.add(paths)
            self._num_paths += num_added
        if num_added and round_trip_s:
            text = "%d connections from %s to %s: a round trip takes %.1f ms"
            _log.info(text, len(paths), path.local.name, self.label, round_trip_s * 1e3)
