"""One peer as the initiator sees it: the paths to it, their lanes, and retries.

Its rule: a part ends once. It is tried on every path, in up to two rounds, until a path carries it, its deadline
passes, or the peer refuses it. A WRITE is sent again only after the target has ended the connection that may still be
storing its first copy. If the first WRITE failed for good, the same holds for WRITEs of later batches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from protocol.errors import (
    Cancelled,
    Incompatible,
    IntegrityError,
    MoonserveError,
    PeerLost,
    Unauthenticated,
)
from transfer.address import Address, Rail
from transfer.base import Op, Transfer
from transfer.batch import Job
from transfer.config import FaultPlan
from transfer.lane import Lane
from transfer.paths.chooser import Path, PathChooser, paths_between
from transfer.paths.endpoints import Endpoints, Unfenced
from transfer.paths.health import RailHealth
from transfer.paths.topology import Topology
from transfer.plan import Part, Planned
from transfer.stats import Incident, TransferStats
from transfer.tcp.session import StreamSession
from transfer.waiting import Group

_log = logging.getLogger(__name__)

_ROUNDS = 2
"""Rounds over all paths. The connection that broke may have been an old one, so each path is dialled again once."""
_MAX_CORRUPT = 3
"""Attempts at a slice that keeps arriving with a wrong checksum."""
_HOPELESS = (Unauthenticated, Incompatible)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Dependencies that all peers of one engine share."""

    connect: Callable[[Address, Path, float, Callable[[], None]], StreamSession]
    topology: Topology
    stats: TransferStats
    faults: FaultPlan
    streams: int
    endpoints: Endpoints
    unfenced: Unfenced


class Peer:
    """Schedules parts over the paths to one peer. All methods are thread-safe. Only `with_session`, `run_here`,
    `read_here` and `join` block."""

    def __init__(self, address: Address, local_rails: Iterable[Rail], surroundings: Surroundings) -> None:
        """Creates the paths to the peer; connects nothing. Raises PeerLost if no transport is in common."""
        self.address = address
        self.label = address.name or address.instance.hex()[:8]
        self.used_at = time.monotonic()
        self._surroundings = surroundings
        self._lock = threading.Lock()
        paths = list(paths_between(local_rails, address, surroundings.streams))
        if not paths:
            raise PeerLost("no transport in common", peer=self.label)
        self.transports = tuple(dict.fromkeys(path.transport for path in paths))
        self._num_paths = len(paths)
        self._chooser = PathChooser(paths, surroundings.topology, RailHealth())
        self._lanes: dict[Path, Lane] = {}
        self._near: Lane | None = None
        """The shm lane, whose session may read this host's memory directly."""
        self._retired: list[Lane] = []
        self._forgotten = False

    @property
    def idle(self) -> bool:
        return not self._lanes

    def put(self, job: Job, planned: Planned) -> None:
        self._dispatch(job, planned.parts)

    def run_here(self, job: Job, planned: Planned) -> bool:
        """Carries a job of one part in the caller's thread. Returns False if that is not possible immediately."""
        (part,) = planned.parts
        now = time.monotonic()
        with self._lock:
            self.used_at = now
            path = self._choose(part, now)
            lane = self._lanes.get(path) if path is not None else None
        if path is None or lane is None:
            self._unsent(path, part)
            return False
        lane.stats.submitted(part.nbytes)
        if lane.run_here(Group(job, (part,))):
            return True
        lane.stats.withdrawn(part.nbytes)
        self._unsent(path, part)
        return False

    def _unsent(self, path: Path | None, part: Part) -> None:
        if path is not None:
            with self._lock:
                self._chooser.dropped(path, part.nbytes)

    def read_here(self, transfer: Transfer, deadline_at: float) -> bool:
        """Executes a READ in the caller's thread. Returns False if it did not happen: then plan it and `put` it."""
        lane, began = self._near, time.monotonic()
        if lane is None and self._num_paths == 1:
            lane = next(iter(self._lanes.values()), None)
        if lane is None or not lane.read_here(transfer, deadline_at):
            return False
        lane.stats.arrived(Op.READ, transfer.length, time.monotonic() - began)
        return True

    def with_session(self, work: Callable[[StreamSession, float], T], deadline_at: float) -> T:
        """Runs `work(session, deadline_at)` on a path, or on another one after PeerLost. Blocks. Raises the last
        PeerLost."""
        tried: list[Path] = []
        lost: MoonserveError = PeerLost("the peer was given up", peer=self.label)
        while True:
            now = time.monotonic()
            with self._lock:
                path = self._chooser.choose("", 0, now, tried)
                if path is None or self._forgotten:
                    raise lost
                lane = self._lane(path)
                lane.num_visitors += 1
            tried.append(path)
            others_left = len(tried) < self._num_paths
            try:
                return lane.with_session(work, now + (deadline_at - now) / (2 if others_left else 1))
            except PeerLost as error:
                lost = error
            finally:
                with self._lock:
                    lane.num_visitors -= 1

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

    # Reports of the lanes, in the carrying thread.

    def arrived(self, lane: Lane, part: Part, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            self._chooser.done(lane.path, part.nbytes, seconds, now)
        lane.stats.arrived(part.op, part.nbytes, now - part.taken_at)
        lane.stats.withdrawn(part.nbytes)
        part.job.settle(part, None)

    def refused(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        """Handles a part that the peer refused or that arrived corrupt. The session stays usable."""
        if isinstance(error, IntegrityError):
            self._corrupt(lane, part, error)
        else:
            self._withdrawn(lane, part)
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
        self._dispatch(part.job, (part,), failed_on=lane, error=error)

    def lost(self, lane: Lane, parts: Sequence[Part], error: MoonserveError, *, connected: bool) -> None:
        self._failed_on(lane, parts, error)
        for part in parts:
            part.tried.append(lane.path)
            self._try_again(lane, part, error, connected)

    def _failed_on(self, lane: Lane, parts: Sequence[Part], error: MoonserveError) -> None:
        now = time.monotonic()
        with self._lock:
            rested = [self._chooser.failed(lane.path, part.nbytes, now) for part in parts]
        _no_longer_in_flight(lane, parts)
        if any(rested):
            lane.stats.count(Incident.REST)
            _log.warning("rail %s to %s rests: %s", lane.path.local.name, self.label, error)

    def ended(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        """Fails a part that was not started: cancelled, overdue or given up."""
        self._withdrawn(lane, part)
        self._fail(lane, part, error)

    def fenced(self, connection_ids: Iterable[int]) -> None:
        """Records that the target no longer serves these connections."""
        self._surroundings.unfenced.remove(self.address.instance, connection_ids)

    def opened(self, lane: Lane) -> None:
        self._surroundings.endpoints.opened(lane)

    def closed(self, lane: Lane) -> None:
        self._surroundings.endpoints.closed(lane)

    def fell_idle(self) -> None:
        self._surroundings.endpoints.trim()

    def may_retire(self, lane: Lane) -> bool:
        """Returns True if an idle lane may end. After True it must end."""
        with self._lock:
            if lane.num_visitors or not lane.idle:
                return False
            if self._lanes.get(lane.path) is lane:
                del self._lanes[lane.path]
                if lane is self._near:
                    self._near = None
                self._retired = [old for old in self._retired if old.thread.is_alive()] + [lane]
        return True

    def _try_again(self, lane: Lane, part: Part, error: MoonserveError, connected: bool) -> None:
        overdue = time.monotonic() >= part.deadline_at
        if overdue or self._forgotten or part.job.cancelled or isinstance(error, _HOPELESS):
            self._fail(lane, part, error)
            return
        if len(part.tried) >= self._num_paths:
            part.rounds += 1
            part.tried.clear()
            if part.rounds >= _ROUNDS or not connected:
                self._fail(lane, part, error)
                return
        lane.stats.count(Incident.RETRY)
        self._dispatch(part.job, (part,), failed_on=lane, error=error)

    def _fail(self, lane: Lane, part: Part, error: MoonserveError) -> None:
        if not isinstance(error, Cancelled):
            lane.stats.count(Incident.FAILURE)
        if part.fences:
            self._surroundings.unfenced.add(self.address.instance, part.fences)
        part.job.settle(part, error)

    def _withdrawn(self, lane: Lane, part: Part) -> None:
        with self._lock:
            self._chooser.dropped(lane.path, part.nbytes)
        _no_longer_in_flight(lane, (part,))

    def _dispatch(
        self,
        job: Job,
        parts: Sequence[Part],
        *,
        failed_on: Lane | None = None,
        error: MoonserveError | None = None,
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
                self._surroundings.endpoints.used(lane)
                nbytes = sum(part.nbytes for part in chosen)
                lane.stats.submitted(nbytes)
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
            raise PeerLost("the peer was given up", peer=self.label)
        try:
            return self._lane(path)
        except PeerLost:
            self._chooser.dropped(path, part.nbytes)
            raise

    def _choose(self, part: Part, now: float) -> Path | None:
        """Returns the path for a part and counts the part as sent there. The lock is held."""
        if self._forgotten:
            return None
        path = self._chooser.choose(part.local.location, part.nbytes, now, part.tried)
        if path is not None:
            self._chooser.sent(path, part.nbytes)
            part.has_alternative = self._num_paths - len(part.tried) > 1
            if part.op is Op.WRITE and (left := self._surroundings.unfenced.at(self.address.instance)):
                part.fences += set(left).difference(part.fences)
        return path

    def _lane(self, path: Path) -> Lane:
        """Returns the path's lane, creating it if needed. The lock is held. Raises PeerLost if no thread can be
        started."""
        lane = self._lanes.get(path)
        if lane is None:
            lane = self._lanes[path] = self._new_lane(path)
            if path.transport == "shm":
                self._near = lane
        return lane

    def _new_lane(self, path: Path) -> Lane:
        try:
            return Lane(
                path,
                peer=self,
                stats=self._surroundings.stats.of(path.transport, path.local.name, self.label),
                faults=self._surroundings.faults,
            )
        except RuntimeError as error:
            raise PeerLost(f"no thread for another connection: {error}", peer=self.label) from error

    def connect(self, path: Path, deadline_at: float, while_waiting: Callable[[], None]) -> StreamSession:
        try:
            return self._surroundings.connect(self.address, path, deadline_at, while_waiting)
        except OSError as error:
            raise PeerLost(f"cannot connect: {error}", peer=self.label) from error


def _no_longer_in_flight(lane: Lane, parts: Sequence[Part]) -> None:
    lane.stats.withdrawn(sum(part.nbytes for part in parts))
