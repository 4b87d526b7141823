"""Serves a node's express connections: takes them over from the lean server, runs a thread for each, ends them.

A thread answers one question at a time, from and into the node's memory. Gets read the published index as other
processes do, without the event loop and without the GIL (`kvstore.native.answering`); puts are in
`kvstore.express.storing`. Rules: the number of connections is limited, and a client that gets none uses RPCs and the
transfer engine; a slow peer only blocks its own thread, for a bounded time. An object may be replaced while a get sends
it: the reader's checksum detects this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from kvstore.express import frames
from kvstore.express.frames import QUESTION, Kind, MalformedQuestion
from kvstore.express.link import Link
from kvstore.express.storing import Storing
from kvstore.native.answering import Desk, End
from kvstore.native.layout import Retired
from kvstore.native.metadata import KeyIndex
from kvstore.native.reader import MappedReader
from protocol.errors import DeadlineExceeded, Overloaded, PeerLost
from transfer import Segment

log = logging.getLogger(__name__)

MOST_S = 30.0
"""Limit for one question, whatever its deadline: it occupies a thread and, during a put, reserved memory."""
IDLE_S = 300.0
MAX_CONNECTIONS = 256
"""Limit of threads, most of them asleep. A client uses one connection per concurrent call."""
_RETRY_S = 10.0


class ExpressService:
    """Answers the questions of all connections. `serve` is called for each connection in its own thread."""

    def __init__(self, index: KeyIndex, segment: Segment, storing: Storing) -> None:
        self._index = index
        self._memory = segment.buffer
        self._storing = storing
        self._reader = MappedReader(index.memory, segment.buffer)

    def serve(self, link: Link) -> None:
        """Answers until the connection ends. Raises PeerLost, or DeadlineExceeded for a slow or idle peer."""
        desk = self._desk(link)
        while True:
            head = self._gets_answered(desk)
            kind, pin, tenant_bytes, count, deadline_ms, _, nbytes = QUESTION.unpack(head)
            if count > frames.MAX_KEYS or nbytes > frames.MAX_BYTES:
                raise MalformedQuestion("a question that is too large")
            give_up_at = time.monotonic() + min(deadline_ms / 1000, MOST_S)
            if kind != Kind.PUT:
                raise MalformedQuestion(f"a question of kind {kind}, or of too many keys")
            self._storing.put(link, count, nbytes, pin, tenant_bytes, give_up_at)

    def _desk(self, link: Link) -> Desk:
        desk = Desk(
            link.fileno(),
            most_bytes=frames.MAX_BYTES,
            most_s=MOST_S,
            idle_s=IDLE_S,
            spin_ns=link.spin_ns,
        )
        desk.use(self._reader)
        return desk

    def _gets_answered(self, desk: Desk) -> bytes:
        """Answers gets. Returns the head of the next question that is not a get, or a get that is too large."""
        while (end := desk.answer()) is not End.OTHER:
            if end is End.LATE:
                raise DeadlineExceeded("the peer was slow or idle")
            if end is End.HANGUP:
                raise PeerLost("the connection broke")
            with contextlib.suppress(Retired):  # the index grew again: the next `answer` reports it
                self._reader = MappedReader(self._index.memory, self._memory)
            desk.use(self._reader)
        return desk.take_head()


class ExpressConnections:
    """All express connections of a node. Thread-safe. `serve` raises PeerLost or DeadlineExceeded at the end of one."""

    def __init__(self, serve: Callable[[Link], None], *, max_connections: int = MAX_CONNECTIONS) -> None:
        self._serve = serve
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._threads: dict[Link, threading.Thread] = {}
        self._closed = False

    def admit(self) -> None:
        """Raises Overloaded if the limit of connections is reached."""
        if self._closed or len(self._threads) >= self._max_connections:
            raise Overloaded("no place for an express connection", retry_after_s=_RETRY_S)

    def take(self, sock: socket.socket) -> None:
        """Takes over an authenticated connection and starts its thread."""
        try:
            link = Link(sock)
        except OSError:  # the peer has closed it meanwhile
            sock.close()
            return
        thread = threading.Thread(target=self._run, args=(link,), name="express", daemon=True)
        with self._lock:
            if self._closed:
                link.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit of threads
                log.warning("no thread for an express connection: %s", error)
                link.close()
                return
            self._threads[link] = thread

    def close(self) -> None:
        """Ends all connections and waits for their threads, which may still answer complete questions. Meanwhile the
        event loop must run."""
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
        for link in threads:
            link.shut()
        for thread in threads.values():
            thread.join()

    def _run(self, link: Link) -> None:
        try:
            with contextlib.suppress(PeerLost, DeadlineExceeded):
                self._serve(link)
        except Exception:  # a bug only ends this connection; its client falls back to RPCs
            log.exception("an express connection ended")
        finally:
            with self._lock:
                del self._threads[link]
                link.close()
