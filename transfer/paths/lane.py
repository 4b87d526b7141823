"""One lane: the session on one path, the queue in front of it and the thread that runs it.

Its rule: every part ends by its deadline, whatever the peer does, and a failed part leaves no session behind on which
late bytes could still arrive. The session is used by the thread that holds its lock: the lane's own, or a caller's,
which carries only its own work. While the lock is free, nothing waits and nothing is in flight. Knows nothing of other
paths. Results are reported to the peer in the carrying thread, and the peer decides what happens to lost parts.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from moonserve.protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.transfer.batch import Part
from moonserve.transfer.config import FaultPlan
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.paths.lane_queue import Group, GroupQueue, Inbox, attempt_ends_at
from moonserve.transfer.paths.path_selection import TransferPath
from moonserve.transfer.paths.traffic_stats import Incident, PathStats
from moonserve.transfer.transport_interface import STEP_S, Op, Session, Slice, without_traceback

_log = logging.getLogger(__name__)

IDLE_S = 60.0
"""A lane that has been unused for this long and is no longer connected ends its thread."""
_FENCE_S = 6.0

T = TypeVar("T")


class LaneListener(Protocol):
    """The peer of a lane. Its methods are called in the carrying thread."""

    def connect(self, path: TransferPath, deadline_at: float, while_waiting: Callable[[], None]) -> Session: ...
    def on_opened(self, lane: "Lane") -> None: ...
    def on_closed(self, lane: "Lane") -> None: ...
    def on_idle(self) -> None: ...
    def may_retire(self, lane: "Lane") -> bool:
        """Returns True if an idle lane may end. After True it must end."""

    def on_unfenced(self, connection_id: int) -> None:
        """Records that the target may still store a WRITE of this broken connection."""

    def on_fenced(self, connection_ids: Iterable[int]) -> None:
        """Records that the target no longer serves these connections."""

    def on_arrived(self, lane: "Lane", part: Part, seconds: float) -> None: ...
    def on_refused(self, lane: "Lane", part: Part, error: MoonserveError) -> None:
        """Handles a part that the peer refused or that arrived corrupt. The session stays usable."""

    def on_lost(self, lane: "Lane", parts: Sequence[Part], error: MoonserveError, *, connected: bool) -> None: ...
    def on_ended(self, lane: "Lane", part: Part, error: MoonserveError) -> None:
        """Fails a part that was not started: cancelled, overdue or given up."""


class Lane:
    """Carries parts over one path. Implements `SliceSource` for its own session; `put` never blocks."""

    def __init__(self, path: TransferPath, *, listener: LaneListener, stats: PathStats, faults: FaultPlan) -> None:
        self.path = path
        self.stats = stats
        self.num_callers = 0
        """Callers inside `with_session`, counted by the peer. The lane does not retire while there are any."""
        self._listener = listener
        self._faults = faults
        self._inbox = Inbox()
        self._arrived = GroupQueue()
        """Groups that the lane's thread has received while it waits for the session lock."""
        self._groups = GroupQueue()
        """Groups that the holder of the session lock carries."""
        self._jobs: dict[Part, Group] = {}
        """Parts that the session has taken and not settled, with their groups."""
        self._session: Session | None = None
        self._session_lock = threading.Lock()
        """Held by the thread that uses the session."""
        self._locked_by_caller = False
        """True while a caller, not the lane's thread, holds the session lock."""
        self._evicted = False
        """True once the endpoint pool has evicted this connection."""
        self._forgotten = threading.Event()
        self._last_end_at = 0.0
        self.thread = threading.Thread(target=self._run, name=f"transfer {path.transport}", daemon=True)
        self.thread.start()

    def put(self, group: Group) -> None:
        self._inbox.put(group)

    def run_inline(self, single: Slice) -> bool:
        """Carries a slice in the caller's thread if the lane is idle and connected. Returns False if it did not arrive.

        Raises the peer's refusal.
        """
        session = self._session
        # A caller does not overtake waiting groups.
        if session is None or not self.idle or not self._session_lock.acquire(blocking=False):
            return False
        self._locked_by_caller = True
        try:
            if session is not self._session or not session.alive():
                return False
            session.carry_inline(single)
            return True
        except (InvalidRequest, StaleLease):
            self.stats.count(Incident.FAILURE)
            raise
        except IntegrityError:
            self.stats.count(Incident.CORRUPT)
            return False
        except BaseException as error:  # the session may be in the middle of a frame
            if single.op is Op.WRITE:
                self._listener.on_unfenced(session.connection_id)
            self._disconnect()
            if not isinstance(error, Exception):
                raise
            return False  # any other error is handled by the ordinary submission
        finally:
            self._locked_by_caller = False
            self._session_lock.release()

    def copy_inline(self, window_id: int, segment_id: int, local: Segment, rows: bytes | int, count: int) -> bool:
        """Carries a READ, or a WRITE unless the window is 0, by native code in the caller's thread if the lane is idle.
        Returns False if that failed."""
        session = self._session
        if session is None or not self._session_lock.acquire(blocking=False):
            return False
        try:
            if not self._inbox.empty() or self._arrived or session is not self._session:
                return False
            outcome = session.copy_inline(window_id, segment_id, local, rows, count, self.stats.native)
        finally:
            self._session_lock.release()
        if outcome < 0:
            self.stats.count(Incident.CORRUPT)
        return outcome > 0

    def with_session(self, work: Callable[[Session, float], T], deadline_at: float) -> T:
        """Runs `work` on the session, connecting it if necessary. Blocks; raises PeerLost."""
        if not self._session_lock.acquire(timeout=max(0.0, deadline_at - time.monotonic())):
            raise PeerLost("the connection was busy until the deadline")
        self._locked_by_caller = True
        try:
            return work(self._ready(deadline_at), deadline_at)
        except (InvalidRequest, StaleLease):
            raise
        except BaseException:  # the session may be in the middle of a frame
            self._disconnect()
            raise
        finally:
            self._locked_by_caller = False
            self._session_lock.release()

    def disconnect_when_idle(self) -> None:
        """Requests disconnection once the lane is idle, since the endpoint pool has evicted it. Does not wait."""
        self._evicted = True
        self._inbox.wake()

    def forget(self) -> None:
        """Fails all parts and ends the thread. Does not wait."""
        self._forgotten.set()
        session = self._session
        if session is not None:
            session.abort()
        self._inbox.wake()

    @property
    def idle(self) -> bool:
        return self._inbox.empty() and not self._arrived and not self._groups and not self._jobs

    @property
    def connected(self) -> bool:
        return self._session is not None

    # The lane's own thread.

    def _run(self) -> None:
        try:
            while self._serve_next():
                self._listener.on_idle()
        finally:
            with self._session_lock:
                self._disconnect()
                self._groups.extend(self._arrived)
                self._give_up_waiting()

    def _serve_next(self) -> bool:
        """Serves one wake-up. Returns False when the thread is to end.

        This is a separate function so that an idle thread holds no reference to a group and so to its memory.
        """
        something_came = self._inbox.wait_into(self._arrived, IDLE_S)
        self._lock_session()
        try:
            self._work()
            if self._evicted or not (something_came or self._session_lives()):
                self._disconnect()
        finally:
            self._session_lock.release()
        if self._forgotten.is_set():
            return False
        return something_came or self._session is not None or not self._listener.may_retire(self)

    def _lock_session(self) -> None:
        """Waits for the session lock and enforces the deadlines of received groups meanwhile."""
        while not self._session_lock.acquire(timeout=STEP_S):
            self._inbox.drain_into(self._arrived)
            self._end_expired(self._arrived)
        self._groups.extend(self._arrived)
        self._arrived.clear()

    def _session_lives(self) -> bool:
        return self._session is not None and self._session.alive()

    # The holder of the session lock.

    def _work(self) -> None:
        """Carries groups until none waits."""
        while True:
            self._drain()
            if self._forgotten.is_set():
                self._give_up_waiting()
            if not self._groups:
                return
            connect_until = max(group.connect_until for group in self._groups)
            connected = False
            try:
                session = self._ready(connect_until)
                connected = True
                self._fence(session)
                session.carry(self)
            except Exception as error:  # an internal error too must end the batch, not this thread
                self._on_broken(self._to_error(error), connected, connect_until)
            except BaseException:  # the caller's thread was interrupted
                self._on_broken(PeerLost("the calling thread was interrupted"), False, math.inf)
                raise

    def _drain(self) -> None:
        if not self._locked_by_caller and not self._inbox.empty():
            self._inbox.drain_into(self._groups)

    def _ready(self, deadline_at: float) -> Session:
        """Returns a live session, connecting if necessary. Raises PeerLost."""
        if not self._session_lives():
            self._disconnect()
        if self._session is None:
            if time.monotonic() >= deadline_at:
                raise PeerLost("the deadline passed before the peer was reached")
            self._session = self._listener.connect(self.path, deadline_at, self.tick)
            self._evicted = False
            self.stats.count(Incident.CONNECT)
            self._listener.on_opened(self)
        if self._forgotten.is_set():  # `forget` may have run before the session existed
            raise PeerLost("the peer was dropped")
        return self._session

    def _disconnect(self) -> None:
        self._evicted = False
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self._listener.on_closed(self)

    def _fence(self, session: Session) -> None:
        """Ends, at the target, the earlier connections on which the waiting parts were sent."""
        group = self._groups[0] if self._groups else None
        parts = list(group.parts) if group is not None else []
        earlier = {connection_id: part for part in parts for connection_id in part.fences}
        for connection_id, part in earlier.items():
            session.fence(connection_id, min(part.deadline_at, time.monotonic() + _FENCE_S))
        if earlier:
            self._listener.on_fenced(earlier)
        if self._groups and self._groups[0] is group:  # otherwise its attempt timed out meanwhile
            for part in parts:
                part.fences.clear()

    def _on_broken(self, error: MoonserveError, connected: bool, connect_until: float) -> None:
        connection_id = self._session.connection_id if self._session is not None else None
        self._disconnect()
        self.stats.count(Incident.BREAK)
        lost = list(self._jobs)
        for part in lost:
            if part.op is Op.WRITE and connection_id is not None:
                part.fences.append(connection_id)
        if not connected:
            lost += self._groups.pop_disconnected(time.monotonic(), connect_until)
        elif not lost and self._groups:  # the fence broke the session before anything was sent
            lost += self._groups.popleft().parts
        self.stats.taken(-len(self._jobs))
        self._jobs.clear()
        self._listener.on_lost(self, lost, error, connected=connected)

    def _give_up_waiting(self) -> None:
        self._drain()
        error = PeerLost("the peer was dropped")
        while self._groups:
            self._end_all(self._groups.popleft(), error)

    def _end_expired(self, waiting: GroupQueue) -> None:
        for part in waiting.pop_ended(time.monotonic()):
            error = part.job.end_error("the peer did not answer in time", self.stats.peer)
            self._listener.on_ended(self, part, error)

    def _end_all(self, group: Group, error: MoonserveError) -> None:
        while group.parts:
            self._listener.on_ended(self, group.parts.popleft(), error)

    def _to_error(self, error: Exception) -> MoonserveError:
        if not isinstance(error, MoonserveError):
            _log.error("transfer failed", exc_info=error)
            error = PeerLost(f"transfer failed: {error!r}")
        error.ids.setdefault("peer", self.stats.peer)
        return without_traceback(error)

    # SliceSource.

    def take(self) -> Part | None:
        self._drain()
        while self._groups:
            group = self._groups[0]
            if group.parts[0].fences:
                return None  # `_fence` must run first and needs the idle session
            if self._end_if_expired(group):
                continue
            part = self._groups.pop_part()
            part.taken_at = time.monotonic()
            part.give_up_at = attempt_ends_at(part, part.taken_at)
            self._jobs[part] = group
            self.stats.taken()
            return part
        return None

    def _end_if_expired(self, group: Group) -> bool:
        if group.fresh:
            group.fresh = False
            while self._faults.held and not self._forgotten.wait(STEP_S):
                pass
        if not group.job.cancelled and time.monotonic() < group.job.deadline_at:
            return False
        self._groups.popleft()
        self._end_all(group, group.job.end_error("the deadline passed before the transfer started", self.stats.peer))
        return True

    def settle(self, part: Slice, error: MoonserveError | None) -> None:
        assert isinstance(part, Part)
        del self._jobs[part]
        self.stats.taken(-1)
        if error is not None:
            self._listener.on_refused(self, part, error)
            return
        now = time.monotonic()
        # Time spent waiting for the previous slice to end does not count.
        seconds = now - max(part.taken_at, self._last_end_at)
        self._last_end_at = now
        self._listener.on_arrived(self, part, seconds)

    def deadline_at(self) -> float:
        return min((part.give_up_at for part in self._jobs), default=math.inf)

    def may_give_up(self) -> bool:
        if not self._jobs and not self._groups:
            return False  # another caller's request, which has its own deadline
        return all(part.has_alternative for part in self._jobs or self._groups[0].parts)

    def tick(self) -> None:
        """Enforces the deadlines of waiting groups and ends the wait if the peer was forgotten."""
        self._drain()
        if self._forgotten.is_set():
            raise PeerLost("the peer was dropped")
        self._end_expired(self._groups)
        if overdue := self._groups.pop_retryable(time.monotonic()):
            error = PeerLost("the peer did not answer in time", peer=self.stats.peer)
            self._listener.on_lost(self, overdue, error, connected=self.connected)
