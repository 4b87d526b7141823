"""One lane: the session on one path, the queue in front of it and the thread that runs it.

Its rule: every part ends by its deadline, whatever the peer does, and a failed part leaves no session behind on which
late bytes could still arrive. The session is used by the thread that holds the turn: the lane's own, or a caller's,
which carries only its own work. While the turn is free, nothing waits and nothing is in flight. Knows nothing of other
paths. Results are reported to the peer in the carrying thread, and the peer decides what happens to lost parts.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from transfer.base import Op, Slice, Transfer
from transfer.config import FaultPlan
from transfer.paths.chooser import Path
from transfer.plan import Part
from transfer.stats import Incident, PathStats
from transfer.tcp.connection import STEP_S
from transfer.tcp.session import StreamSession, without_frames
from transfer.waiting import Group, Inbox, Waiting, attempt_ends_at

if TYPE_CHECKING:
    from transfer.peer import Peer

_log = logging.getLogger(__name__)

IDLE_S = 60.0
"""A lane that has been unused for this long and is no longer connected ends its thread."""
_FENCE_S = 6.0

T = TypeVar("T")


class Lane:
    """Carries parts over one path. Implements `base.Feed` for its own session; `put` never blocks."""

    def __init__(self, path: Path, *, peer: Peer, stats: PathStats, faults: FaultPlan) -> None:
        self.path = path
        self.stats = stats
        self.num_visitors = 0
        """Callers inside `with_session`, counted by the peer. The lane does not retire while there are any."""
        self._peer = peer
        self._faults = faults
        self._inbox = Inbox()
        self._arrived = Waiting()
        """Groups that the lane's thread has received while it waits for the turn."""
        self._groups = Waiting()
        """Groups that the holder of the turn carries."""
        self._jobs: dict[Part, Group] = {}
        """Parts that the session has taken and not settled, with their groups."""
        self._session: StreamSession | None = None
        self._turn = threading.Lock()
        """Held by the thread that uses the session."""
        self._guest = False
        """True while a caller, not the lane's thread, holds the turn."""
        self._unwanted = False
        """True once the endpoint pool has evicted this connection."""
        self._forgotten = threading.Event()
        self._last_end_at = 0.0
        self.thread = threading.Thread(target=self._run, name=f"transfer {path.transport}", daemon=True)
        self.thread.start()

    def put(self, group: Group) -> None:
        self._inbox.put(group)

    def run_here(self, group: Group) -> bool:
        """Carries the group in the caller's thread. Returns False if the lane is busy or not connected."""
        if not self._may_visit():
            return False
        try:
            if self._session is None:
                return False
            self._guest = True
            self._groups.append(group)
            self._work()
            return True
        finally:
            self._guest = False
            self._turn.release()

    def read_here(self, transfer: Transfer, deadline_at: float) -> bool:
        """Executes a READ in the caller's thread if the lane is idle. Returns False if it did not happen."""
        session = self._session
        if session is None or not self._may_visit():
            return False
        self._guest = True
        try:
            if session is not self._session or not session.alive():
                return False
            return session.read_here(transfer, deadline_at)
        except InvalidRequest:
            raise
        except IntegrityError:
            self.stats.count(Incident.CORRUPT)
            return False
        except BaseException as error:  # the session may be in the middle of a frame
            self._disconnect()
            if not isinstance(error, Exception):
                raise
            return False  # any other error is handled by the ordinary submission
        finally:
            self._guest = False
            self._turn.release()

    def with_session(self, work: Callable[[StreamSession, float], T], deadline_at: float) -> T:
        """Runs `work` on the session, connecting it if necessary. Blocks; raises PeerLost."""
        if not self._turn.acquire(timeout=max(0.0, deadline_at - time.monotonic())):
            raise PeerLost("the connection was busy until the deadline")
        self._guest = True
        try:
            return work(self._ready(deadline_at), deadline_at)
        except (InvalidRequest, StaleLease):
            raise
        except BaseException:  # the session may be in the middle of a frame
            self._disconnect()
            raise
        finally:
            self._guest = False
            self._turn.release()

    def _may_visit(self) -> bool:
        """Gives the turn to the caller if the lane is idle. A caller does not overtake waiting groups."""
        return self.idle and self._turn.acquire(blocking=False)

    def disconnect_when_idle(self) -> None:
        """Requests disconnection once the lane is idle, since the endpoint pool has evicted it. Does not wait."""
        self._unwanted = True
        self._inbox.knock()

    def forget(self) -> None:
        """Fails all parts and ends the thread. Does not wait."""
        self._forgotten.set()
        session = self._session
        if session is not None:
            session.abort()
        self._inbox.knock()

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
                self._peer.fell_idle()
        finally:
            with self._turn:
                self._disconnect()
                self._groups.extend(self._arrived)
                self._give_up_waiting()

    def _serve_next(self) -> bool:
        """Serves one wake-up. Returns False when the thread is to end.

        This is a separate function so that an idle thread holds no reference to a group and so to its memory.
        """
        something_came = self._inbox.wait_into(self._arrived, IDLE_S)
        self._await_turn()
        try:
            self._work()
            if self._unwanted or not (something_came or self._session_lives()):
                self._disconnect()
        finally:
            self._turn.release()
        if self._forgotten.is_set():
            return False
        return something_came or self._session is not None or not self._peer.may_retire(self)

    def _await_turn(self) -> None:
        """Waits for the turn and enforces the deadlines of received groups meanwhile."""
        while not self._turn.acquire(timeout=STEP_S):
            self._inbox.empty_into(self._arrived)
            self._end_what_is_over(self._arrived)
        self._groups.extend(self._arrived)
        self._arrived.clear()

    def _session_lives(self) -> bool:
        return self._session is not None and self._session.alive()

    # The holder of the turn.

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
                self._broken(self._translated(error), connected, connect_until)
            except BaseException:  # the caller's thread was interrupted
                self._broken(PeerLost("the caller was interrupted"), False, math.inf)
                raise

    def _drain(self) -> None:
        if not self._guest and not self._inbox.empty():
            self._inbox.empty_into(self._groups)

    def _ready(self, deadline_at: float) -> StreamSession:
        """Returns a live session, connecting if necessary. Raises PeerLost."""
        if not self._session_lives():
            self._disconnect()
        if self._session is None:
            if time.monotonic() >= deadline_at:
                raise PeerLost("the time was over before the peer was reached")
            self._session = self._peer.connect(self.path, deadline_at, self.look_up)
            self._unwanted = False
            self.stats.count(Incident.CONNECT)
            self._peer.opened(self)
        if self._forgotten.is_set():  # `forget` may have run before the session existed
            raise PeerLost("the peer was given up")
        return self._session

    def _disconnect(self) -> None:
        self._unwanted = False
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self._peer.closed(self)

    def _fence(self, session: StreamSession) -> None:
        """Ends, at the target, the earlier connections on which the waiting parts were sent."""
        group = self._groups[0] if self._groups else None
        parts = list(group.parts) if group is not None else []
        earlier = {connection_id: part for part in parts for connection_id in part.fences}
        for connection_id, part in earlier.items():
            session.fence(connection_id, min(part.deadline_at, time.monotonic() + _FENCE_S))
        if earlier:
            self._peer.fenced(earlier)
        if self._groups and self._groups[0] is group:  # otherwise its attempt timed out meanwhile
            for part in parts:
                part.fences.clear()

    def _broken(self, error: MoonserveError, connected: bool, connect_until: float) -> None:
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
        self._peer.lost(self, lost, error, connected=connected)

    def _give_up_waiting(self) -> None:
        self._drain()
        error = PeerLost("the peer was given up")
        while self._groups:
            self._end_all(self._groups.popleft(), error)

    def _end_what_is_over(self, waiting: Waiting) -> None:
        for part in waiting.pop_ended(time.monotonic()):
            error = part.job.why_ended("the peer did not answer in time", self.stats.peer)
            self._peer.ended(self, part, error)

    def _end_all(self, group: Group, error: MoonserveError) -> None:
        while group.parts:
            self._peer.ended(self, group.parts.popleft(), error)

    def _translated(self, error: Exception) -> MoonserveError:
        if not isinstance(error, MoonserveError):
            _log.error("transfer failed", exc_info=error)
            error = PeerLost(f"transfer failed: {error!r}")
        error.ids.setdefault("peer", self.stats.peer)
        return without_frames(error)

    # The session's feed.

    def take(self) -> Part | None:
        self._drain()
        while self._groups:
            group = self._groups[0]
            if group.parts[0].fences:
                return None  # `_fence` must run first and needs the idle session
            if self._not_to_be_begun(group):
                continue
            part = self._groups.pop_part()
            part.taken_at = time.monotonic()
            part.give_up_at = attempt_ends_at(part, part.taken_at)
            self._jobs[part] = group
            self.stats.taken()
            return part
        return None

    def _not_to_be_begun(self, group: Group) -> bool:
        if group.fresh:
            group.fresh = False
            while self._faults.held and not self._forgotten.wait(STEP_S):
                pass
        if not group.job.cancelled and time.monotonic() < group.job.deadline_at:
            return False
        self._groups.popleft()
        self._end_all(group, group.job.why_ended("the time was over before it was begun", self.stats.peer))
        return True

    def settle(self, part: Slice, error: MoonserveError | None) -> None:
        assert isinstance(part, Part)
        del self._jobs[part]
        self.stats.taken(-1)
        if error is not None:
            self._peer.refused(self, part, error)
            return
        now = time.monotonic()
        # Time spent waiting for the previous slice to end does not count.
        seconds = now - max(part.taken_at, self._last_end_at)
        self._last_end_at = now
        self._peer.arrived(self, part, seconds)

    def deadline_at(self) -> float:
        return min((part.give_up_at for part in self._jobs), default=math.inf)

    def may_give_up(self) -> bool:
        if not self._jobs and not self._groups:
            return False  # another caller's request, which has its own deadline
        return all(part.has_alternative for part in self._jobs or self._groups[0].parts)

    def look_up(self) -> None:
        """Enforces the deadlines of waiting groups and ends the wait if the peer was forgotten."""
        self._drain()
        if self._forgotten.is_set():
            raise PeerLost("the peer was given up")
        self._end_what_is_over(self._groups)
        if impatient := self._groups.pop_impatient(time.monotonic()):
            error = PeerLost("the peer did not answer in time", peer=self.stats.peer)
            self._peer.lost(self, impatient, error, connected=self.connected)
