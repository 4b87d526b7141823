"""A transport within one process whose every slice can meet any fate, ordered or drawn by a seed.

`FakeTransport` obeys `base.Transport` and its sessions `base.Session`, laws included: what a broken
session had sent may still be stored later by the target, unless the connection is fenced, and nothing
reaches local memory after `close`. Bytes are copied between the engines' real segments, through their
real windows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum, auto

from protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from transfer import scatter
from transfer.address import Address, Rail
from transfer.base import Dial, Feed, Hosted, Op, Slice, Transfer
from transfer.rows import LOCAL, REMOTE
from transfer.segments import Segment, SegmentInfo

_STEP_S = 0.002


class Fate(StrEnum):
    """What becomes of one slice, one connection attempt or one fence."""

    ARRIVES = auto()
    REFUSED = auto()
    CORRUPT = auto()
    """It arrives with a byte flipped, which is noticed."""
    LOST = auto()
    """The session breaks before anything of it moved."""
    LATE = auto()
    """The session breaks, and the target stores it some time later."""
    SILENT = auto()
    """Nothing happens until its time is over."""
    BUG = auto()
    """The transport's own code fails."""


Decide = Callable[[str, "Slice | None"], Fate]
"""(occasion: "connect", "fence" or "slice", the slice) → its fate. Called from many threads."""


def always_arrives(occasion: str, part: Slice | None) -> Fate:
    return Fate.ARRIVES


class FakeNetwork:
    """What connects the engines of one test. Thread-safe."""

    def __init__(self, decide: Decide = always_arrives) -> None:
        self.decide = decide
        self.counts: Counter[tuple[str, Fate]] = Counter()
        self.open_sessions: set[FakeSession] = set()
        self.connect_s: list[float] = []
        """The time that each attempt to connect was given."""
        self.on_carry: Callable[[Slice, float], None] = lambda part, deadline_at: None
        """Told of each slice, and of the end of the session's patience with it."""
        self._lock = threading.Lock()
        self._hosts: dict[str, Hosted] = {}
        self._served: list[FakeConnection] = []

    def transport(self, name: str = "fake", num_rails: int = 1) -> FakeTransport:
        return FakeTransport(name, num_rails, self)

    def fate(self, occasion: str, part: Slice | None = None) -> Fate:
        fate = self.decide(occasion, part)
        with self._lock:
            self.counts[occasion, fate] += 1
        return fate

    def host(self, endpoint: str, hosted: Hosted) -> None:
        self._hosts[endpoint] = hosted

    def unhost(self, endpoint: str) -> None:
        hosted = self._hosts.pop(endpoint, None)
        with self._lock:
            gone = [connection for connection in self._served if connection.hosted is hosted]
            self._served = [each for each in self._served if each.hosted is not hosted]
        for connection in gone:
            connection.end()

    def serve(self, endpoint: str) -> FakeConnection:
        hosted = self._hosts.get(endpoint)
        if hosted is None:
            raise PeerLost("nobody listens there")
        connection = FakeConnection(hosted)
        with self._lock:
            self._served.append(connection)
        return connection

    def store_what_is_late(self) -> int:
        """The targets get to what broken sessions left behind; how much that was."""
        with self._lock:
            served = list(self._served)
        return sum(connection.store_what_is_late() for connection in served)


class FakeConnection:
    """The target's side: stores, now or late, until it is ended."""

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted
        self._lock = threading.Lock()
        self._late: deque[Callable[[], None]] = deque()
        self._ended = False
        self.served = hosted.served.add(self.end)

    def store(self, part: Slice, *, flip: bool = False) -> None:
        content = _gathered(part)
        with self._lock:
            if self._ended:
                raise PeerLost("the target has ended the connection")
            self._store(part, content, flip)

    def store_later(self, part: Slice) -> None:
        content = _gathered(part)
        self._late.append(lambda: self._store(part, content, False))

    def store_what_is_late(self) -> int:
        with self._lock:
            count = len(self._late)
            while self._late:
                with contextlib.suppress(MoonserveError):  # its window was closed
                    self._late.popleft()()
        return count

    def end(self) -> None:
        """What is late is never stored."""
        with self._lock:
            self._ended = True
            self._late.clear()
        self.hosted.served.remove(self.served)

    def readable(self, part: Slice) -> Segment:
        segment = self.hosted.segments.find(part.segment_id)
        if not segment.readable:
            raise InvalidRequest("not readable")
        scatter.require_inside(part.rows, REMOTE, segment.nbytes)
        return segment

    def _store(self, part: Slice, content: bytearray, flip: bool) -> None:
        if part.window_id is None:
            raise InvalidRequest("a WRITE needs a window")
        window = self.hosted.windows.find(part.window_id, part.segment_id)
        window.require_inside(part.rows)
        if flip and content:
            content[0] ^= 0xFF
        done = 0
        with window:
            for start, _, length in part.rows.tolist():
                window.segment.buffer[start : start + length] = content[done : done + length]
                done += length


def _gathered(part: Slice) -> bytearray:
    content = bytearray()
    for _, start, length in part.rows.tolist():
        content += part.local.buffer[start : start + length]
    return content


class FakeSession:
    """`base.Session`."""

    def __init__(self, network: FakeNetwork, connection: FakeConnection) -> None:
        self.connection_id = connection.served.connection_id
        self._network = network
        self._connection = connection
        self._aborted = threading.Event()
        self._closed = False
        network.open_sessions.add(self)

    def alive(self) -> bool:
        assert not self._closed
        return not self._aborted.is_set()

    def carry(self, feed: Feed) -> None:
        asked: deque[Slice] = deque()
        while True:
            while len(asked) < 4 and (part := feed.take()) is not None:
                asked.append(part)
            if not asked:
                return
            self._carry_one(asked.popleft(), feed)

    def _carry_one(self, part: Slice, feed: Feed) -> None:
        assert not self._closed
        self._keep_time(feed)
        self._network.on_carry(part, feed.deadline_at())
        match self._network.fate("slice", part):
            case Fate.ARRIVES:
                feed.settle(part, self._outcome(part, flip=False))
            case Fate.CORRUPT:
                self._outcome(part, flip=True)
                feed.settle(part, IntegrityError("arrived with another checksum"))
            case Fate.REFUSED:
                feed.settle(part, StaleLease("refused"))
            case Fate.LATE if part.op is Op.WRITE:
                self._connection.store_later(part)
                raise PeerLost("broken, and not all of it is gone")
            case Fate.SILENT:
                while True:
                    self._keep_time(feed)
                    self._aborted.wait(_STEP_S)
            case Fate.BUG:
                raise RuntimeError("a bug of the transport")
            case _:
                raise PeerLost("broken")

    def _outcome(self, part: Slice, *, flip: bool) -> MoonserveError | None:
        try:
            if part.op is Op.WRITE:
                self._connection.store(part, flip=flip)
            else:
                self._fetch(part, flip)
        except (InvalidRequest, StaleLease) as refusal:
            return refusal
        return None

    def _fetch(self, part: Slice, flip: bool) -> None:
        segment = self._connection.readable(part)
        for start, to, length in part.rows.tolist():
            part.local.buffer[to : to + length] = segment.buffer[start : start + length]
        if flip and part.nbytes:
            part.local.buffer[int(part.rows[0, LOCAL])] ^= 0xFF

    def _keep_time(self, feed: Feed) -> None:
        if self._aborted.is_set():
            raise PeerLost("aborted")
        if time.monotonic() >= feed.deadline_at():
            raise PeerLost("not in time")
        feed.look_up()

    def read_at_once(self, transfer: Transfer) -> bool:
        return False

    def read_alone(self, transfer: Transfer, deadline_at: float) -> bool:
        return False

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        raise InvalidRequest("cannot be viewed")

    def list_segments(self, deadline_at: float) -> list[SegmentInfo]:
        if self._network.fate("list") is Fate.SILENT:
            while time.monotonic() < deadline_at and not self._aborted.wait(_STEP_S):
                pass
            raise PeerLost("not in time")
        return [info for info in self._connection.hosted.segments.infos() if info.readable]

    def fence(self, connection_id: int, deadline_at: float) -> None:
        if self._network.fate("fence") is not Fate.ARRIVES:
            raise PeerLost("the fence failed")
        self._connection.hosted.served.end(connection_id, deadline_at - time.monotonic())

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        assert not self._closed
        self._closed = True
        self._network.open_sessions.discard(self)


class FakeListener:
    """`base.Listener`."""

    def __init__(self, rail: Rail, network: FakeNetwork) -> None:
        self.rail = rail
        self._network = network

    def close(self) -> None:
        self._network.unhost(self.rail.endpoint)


class FakeTransport:
    """`base.Transport`."""

    def __init__(self, name: str, num_rails: int, network: FakeNetwork) -> None:
        self.name = name
        self._num_rails = num_rails
        self._network = network

    def listen(self, hosted: Hosted) -> Sequence[FakeListener]:
        listeners = []
        for index in range(self._num_rails):
            endpoint = f"{hosted.credentials.instance.hex()}-{self.name}-{index}"
            self._network.host(endpoint, hosted)
            listeners.append(
                FakeListener(Rail(self.name, f"{self.name}{index}", endpoint), self._network)
            )
        return listeners

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails

    def connect(self, dial: Dial) -> FakeSession:
        self._network.connect_s.append(dial.deadline_at - time.monotonic())
        match self._network.fate("connect"):
            case Fate.ARRIVES:
                return FakeSession(self._network, self._network.serve(dial.remote.endpoint))
            case Fate.SILENT:
                while time.monotonic() < dial.deadline_at:
                    dial.while_waiting()
                    time.sleep(_STEP_S)
        raise PeerLost("cannot be reached")

    def segment_added(self, segment: Segment) -> None:
        """Nothing to register."""

    def segment_removed(self, segment: Segment) -> None:
        """Nothing was registered."""
