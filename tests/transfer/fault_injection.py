"""Fault injection for real transports: a test sets the outcome of slices, connection attempts and fences, or draws it.

The target may store data of a broken session later (`Outcome.LATE`), unless the connection is fenced. The target is
held just before it stores the data, until `store_late_data` is called.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import partial
from typing import Any

import pytest

from moonserve.protocol.errors import IntegrityError, PeerLost, StaleLease
from moonserve.transfer import Op, engine
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.memory.write_windows import Window
from moonserve.transfer.tcp.frames import Header
from moonserve.transfer.tcp.session import StreamSession
from moonserve.transfer.transport_interface import Dial, Slice, SliceSource
from tests.patience import PATIENCE_S

_STEP_S = 0.002


class Outcome(StrEnum):
    """Outcome of one slice, one connection attempt or one fence."""

    ARRIVES = auto()
    REFUSED = auto()
    CORRUPT = auto()
    """It arrives with a flipped byte, and the corruption is detected."""
    LOST = auto()
    """The session breaks before any data is moved."""
    LATE = auto()
    """The session breaks, and the target stores the data some time later."""
    SILENT = auto()
    """Nothing happens until the deadline."""
    BUG = auto()
    """The code of the transport raises an unexpected exception."""


@dataclass(eq=False)
class _Serving:
    """Target's end of one connection."""

    aborted: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class FaultInjector:
    """Sets outcomes for all engines of a test over shm and tcp. Each order is used once; without orders all arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("shm", "tcp"):
            make = partial(self._with_faults, engine._TRANSPORTS[name])
            monkeypatch.setitem(engine._TRANSPORTS, name, make)
        self.orders: dict[str, list[Outcome]] = {"slice": [], "connect": [], "fence": [], "list": []}
        self.on: dict[str, Callable[[], object]] = {}
        """Callback that runs first, by occasion."""
        self.draw: Callable[[str], Outcome] | None = None
        """Draws the outcome of an occasion. Replaces the orders if set."""
        self.silent_connect_s = float("inf")
        self.counts: Counter[tuple[str, Outcome]] = Counter()
        self.connect_s: list[float] = []
        """Timeout of each connection attempt."""
        self.on_carry: Callable[[Slice, float], None] = lambda part, deadline_at: None
        """Called with each slice and its deadline."""
        self.open_sessions: set[object] = set()
        self._lock = threading.Lock()
        self._late: dict[bytes, threading.Event] = {}
        """Rows of the WRITEs that are to be late, each with an event that is set when the target reaches the WRITE."""
        self._held: list[_Serving] = []

    def store_late_data(self) -> int:
        """Lets the targets go on with what broken sessions left behind. Returns how many of them were not aborted."""
        with self._lock:
            held, self._held = self._held, []
        count = sum(not serving.aborted.is_set() for serving in held)
        for serving in held:
            serving.released.set()
            assert serving.ended.wait(PATIENCE_S)
        return count

    def _of(self, occasion: str) -> Outcome:
        self.on.get(occasion, bool)()
        with self._lock:
            if self.draw is not None:
                outcome = self.draw(occasion)
            else:
                orders = self.orders[occasion]
                outcome = orders.pop(0) if orders else Outcome.ARRIVES
            self.counts[occasion, outcome] += 1
        return outcome

    def _with_faults(self, make: Callable[[], Any]) -> Any:
        transport = make()
        transport.connect = partial(self._connect, transport.connect)
        target = transport._target
        transport._target = lambda state, sock: self._watched(target(state, sock))
        return transport

    def _connect(self, connect: Callable[[Dial], Any], dial: Dial) -> Any:
        began = time.monotonic()
        self.connect_s.append(dial.deadline_at - began)
        outcome = self._of("connect")
        if outcome is Outcome.SILENT:
            while time.monotonic() < min(dial.deadline_at, began + self.silent_connect_s):
                dial.while_waiting()
                time.sleep(_STEP_S)
        if outcome is not Outcome.ARRIVES:
            raise PeerLost("cannot be reached")
        session = connect(dial)
        self.open_sessions.add(session)
        session.send_request = partial(self._send_request, session, session.send_request)
        session.copy_inline = partial(StreamSession.copy_inline, session)  # not natively
        session.carry_inline = partial(StreamSession.carry_inline, session)
        session.fence = partial(self._fence, session.fence)
        session.list_segments = partial(self._list, session, session.list_segments)
        session.close = partial(self._close, session, session.close)
        return session

    def _send_request(
        self, session: Any, send: Callable[[Slice, SliceSource], bool], part: Slice, slices: SliceSource
    ) -> bool:
        self.on_carry(part, slices.deadline_at())
        outcome = self._of("slice")
        match outcome:
            case Outcome.REFUSED | Outcome.CORRUPT:
                refused = outcome is Outcome.REFUSED
                slices.settle(part, StaleLease("refused") if refused else IntegrityError("corrupt"))
                return False
            case Outcome.LATE if part.op is Op.WRITE:
                self._send_late(session, send, part, slices)
                raise PeerLost("broken, and not all of it is gone")
            case Outcome.SILENT:
                self._wait_for_nothing(session, threading.Event())
            case Outcome.BUG:
                raise RuntimeError("a bug of the transport")
            case Outcome.LATE | Outcome.LOST:
                raise PeerLost("broken")
        return send(part, slices)

    def _send_late(
        self, session: Any, send: Callable[[Slice, SliceSource], bool], part: Slice, slices: SliceSource
    ) -> None:
        key, reached = part.rows.tobytes(), threading.Event()
        with self._lock:
            self._late[key] = reached
        session._written = None, 0  # by message, not under a lease
        try:
            send(part, slices)
            session._connection.flush()
            self._wait_for_nothing(session, reached)
        finally:
            with self._lock:
                self._late.pop(key, None)

    def _wait_for_nothing(self, session: Any, event: threading.Event) -> None:
        while not event.wait(_STEP_S):
            session._connection.check_deadline()
            if session._connection.hung_up():
                raise PeerLost("aborted")

    def _fence(self, fence: Callable[[int, float], None], connection_id: int, end: float) -> None:
        if self._of("fence") is not Outcome.ARRIVES:
            raise PeerLost("the fence failed")
        fence(connection_id, end)

    def _list(self, session: Any, list_segments: Callable[[float], Any], deadline_at: float) -> Any:
        if self._of("list") is Outcome.SILENT:
            session._connection.set_deadline(deadline_at)
            self._wait_for_nothing(session, threading.Event())
        return list_segments(deadline_at)

    def _close(self, session: object, close: Callable[[], None]) -> None:
        self.open_sessions.remove(session)
        close()

    def _watched(self, target: Any) -> Any:
        serving = _Serving()
        abort, close, window_for = target.connection.abort, target.close, target.window_for

        def aborted() -> None:
            serving.aborted.set()
            abort()

        def closed() -> None:
            close()
            serving.ended.set()

        def held(header: Header, rows: Rows) -> Window:
            self._hold_late_data(serving, rows)
            window: Window = window_for(header, rows)
            return window

        target.connection.abort, target.close, target.window_for = aborted, closed, held
        target._keep = lambda header: False  # it serves nothing natively
        return target

    def _hold_late_data(self, serving: _Serving, rows: Rows) -> None:
        with self._lock:
            reached = self._late.pop(rows.tobytes(), None)
            if reached is None:
                return
            self._held.append(serving)
        reached.set()
        while not serving.released.wait(_STEP_S):
            if serving.aborted.is_set():
                raise PeerLost("the target has ended the connection")
