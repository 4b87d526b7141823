"""One peer as the initiator sees it: a queue of jobs, the thread that does them, the session.

Its rule: every job ends by its deadline, whatever the peer does, and a job that has failed leaves no
session behind on which late bytes could still arrive.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from protocol.errors import InvalidRequest, MoonserveError, PeerLost, StaleLease
from transfer import plan
from transfer.address import Address, parse
from transfer.base import Credentials, Dial, Move, Op, Session, Transfer, Transport
from transfer.batch import Batch
from transfer.faults import FaultPlan

_log = logging.getLogger(__name__)

_IDLE_S = 60.0
"""A peer that is unused for this long and no longer connected gives its thread back."""


@dataclass(frozen=True, slots=True)
class Job:
    """A batch's transfers for one peer."""

    transfers: Sequence[Transfer]
    indices: Sequence[int]
    deadline_at: float
    batch: Batch

    def fail(self, error: MoonserveError) -> None:
        self.batch.settle_part(dict.fromkeys(self.indices, error))


class Peer:
    """`put` never blocks. `may_retire` is asked before the thread ends of its own accord."""

    def __init__(
        self,
        address: str,
        *,
        transports: Sequence[Transport],
        credentials: Credentials,
        faults: FaultPlan,
        may_retire: Callable[[Peer], bool],
    ) -> None:
        self.address = address
        self._transports = transports
        self._credentials = credentials
        self._faults = faults
        self._may_retire = may_retire
        # SimpleQueue.put neither blocks nor gives up the GIL: it is called from the compute thread.
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._session: Session | None = None
        self._forgotten = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-peer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return self._inbox.empty()

    def put(self, job: Job) -> None:
        self._inbox.put(job)

    def forget(self) -> None:
        """Its jobs fail now and its thread ends. Does not wait."""
        self._forgotten.set()
        session = self._session
        if session is not None:
            session.abort()
        self._inbox.put(None)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._perform_next():
                pass
        finally:
            self._disconnect()
            self._fail_waiting()

    def _perform_next(self) -> bool:
        """A function of its own, so that an idle thread holds no job and so no memory."""
        job = self._next_job()
        if job is not None:
            self._perform(job)
        return job is not None

    def _next_job(self) -> Job | None:
        """None: the thread is to end."""
        if self._forgotten.is_set():  # `_look_up` may have taken the wake-up call out of the inbox
            return None
        if self._waiting:
            return self._waiting.popleft()
        while True:
            try:
                job = self._inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                if not self._connected() and self._may_retire(self):
                    return None
                continue
            return job

    def _fail_waiting(self) -> None:
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                self._waiting.append(job)
        for job in self._waiting:
            job.fail(PeerLost("the peer was given up"))

    def _perform(self, job: Job) -> None:
        errors: dict[int, MoonserveError] = {}
        left = set(job.indices)
        try:
            self._carry_all(job, errors, left)
        except Exception as error:  # also a bug of ours must end the batch, not this thread
            self._disconnect()
            errors.update(dict.fromkeys(left, self._translated(error)))
        job.batch.settle_part(errors)

    def _carry_all(self, job: Job, errors: dict[int, MoonserveError], left: set[int]) -> None:
        """Takes from `left` what has ended, well or with an error of its own."""
        planned, faulty = plan.moves(job.transfers, job.indices)
        errors.update(faulty)
        left.difference_update(faulty)
        session = self._ready(job)
        for move in planned:
            self._carry(session, move, errors)
            left.difference_update(move.indices)

    def _carry(self, session: Session, move: Move, errors: dict[int, MoonserveError]) -> None:
        try:
            if move.op is Op.READ:
                session.read(move)
            else:
                session.write(move, corrupt=self._faults.take_corrupt_write())
        except (InvalidRequest, StaleLease) as refused:
            errors.update(dict.fromkeys(move.indices, _without_frames(refused)))

    def _ready(self, job: Job) -> Session:
        """A live session, told the job's deadline."""
        if self._faults.delay_s:
            self._forgotten.wait(self._faults.delay_s)
        if self._forgotten.is_set() or time.monotonic() >= job.deadline_at:
            raise PeerLost("the batch's time was over before it began")
        if self._faults.take_drop():
            raise PeerLost("connection dropped by the fault plan")
        if not self._connected():
            self._disconnect()
            self._session = self._connect(job.deadline_at)
        assert self._session is not None
        self._session.begin(job.deadline_at)
        return self._session

    def _connected(self) -> bool:
        return self._session is not None and self._session.alive()

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _connect(self, deadline_at: float) -> Session:
        """Over the first transport that both have and that gets through."""
        address = parse(self.address)
        dial = Dial(
            address=address,
            credentials=self._credentials,
            deadline_at=deadline_at,
            while_waiting=self._look_up,
        )
        lost: PeerLost | None = None
        for transport in self._usable(address):
            try:
                return transport.connect(dial)
            except PeerLost as error:
                lost = error
        raise lost or PeerLost("no transport in common")

    def _usable(self, address: Address) -> Iterable[Transport]:
        return (transport for transport in self._transports if transport.reachable(address))

    def _look_up(self) -> None:
        """While the peer is silent: waiting jobs keep their own deadlines, and forget is heeded."""
        while not self._inbox.empty():
            if (job := self._inbox.get()) is not None:
                self._waiting.append(job)
        if self._forgotten.is_set():
            raise PeerLost("the peer was given up")
        now = time.monotonic()
        for job in [job for job in self._waiting if job.deadline_at <= now]:
            self._waiting.remove(job)
            job.fail(PeerLost("the peer did not answer in time"))

    def _translated(self, error: Exception) -> MoonserveError:
        if not isinstance(error, MoonserveError):
            _log.error("transfer failed", exc_info=error)
            error = PeerLost(f"transfer failed: {error!r}")
        error.ids.setdefault("peer", self.address.partition(";host=")[0])
        return _without_frames(error)


def _without_frames(error: MoonserveError) -> MoonserveError:
    """An error outlives its batch; the frames in its traceback would keep the memory alive with it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
