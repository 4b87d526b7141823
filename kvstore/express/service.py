"""A node's express connections: taken over from the lean server, a thread each, ended with the node.

A thread answers a question at a time, from and into the node's memory. Gets read the published index as any other
process does, so they ask nobody, not even the interpreter (`kvstore.native.answering`);
puts are `kvstore.express.storing`. Rules: there are only so many connections, and a client that finds no place goes
the long way; a peer that is slow costs its own thread, for a bounded time. What a get sends may be replaced meanwhile:
the reader's checksum tells.
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
"""For one question, however long its asker would wait: a thread and, while writing, memory depend on it."""
IDLE_S = 300.0
MAX_CONNECTIONS = 256
"""Threads, most of them asleep: one per call that a client makes at once."""
_RETRY_S = 10.0


class ExpressService:
    """Answers questions of any number of connections: `serve` is called for each, in a thread of its own."""

    def __init__(self, index: KeyIndex, segment: Segment, storing: Storing) -> None:
        self._index = index
        self._memory = segment.buffer
        self._storing = storing
        self._reader = MappedReader(index.memory, segment.buffer)

    def serve(self, link: Link) -> None:
        """Answers until the connection ends: raises PeerLost, or DeadlineExceeded for a peer that was slow or idle."""
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
        """The head of the next question that is no get, or one of too many keys."""
        while (end := desk.answer()) is not End.OTHER:
            if end is End.LATE:
                raise DeadlineExceeded("the peer was slow or idle")
            if end is End.HANGUP:
                raise PeerLost("the connection broke")
            with contextlib.suppress(Retired):  # it grows again: then the desk will say so
                self._reader = MappedReader(self._index.memory, self._memory)
            desk.use(self._reader)
        return desk.take_head()


class ExpressConnections:
    """All express connections of a node. Thread-safe. `serve` raises PeerLost or DeadlineExceeded when one ends."""

    def __init__(self, serve: Callable[[Link], None], *, max_connections: int = MAX_CONNECTIONS) -> None:
        self._serve = serve
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._threads: dict[Link, threading.Thread] = {}
        self._closed = False

    def admit(self) -> None:
        """Raises Overloaded when there is no place."""
        if self._closed or len(self._threads) >= self._max_connections:
            raise Overloaded("no place for an express connection", retry_after_s=_RETRY_S)

    def take(self, sock: socket.socket) -> None:
        """Serves a connection whose peer has proved itself, from now on."""
        try:
            link = Link(sock)
        except OSError:  # it has ended meanwhile
            sock.close()
            return
        thread = threading.Thread(target=self._run, args=(link,), name="express", daemon=True)
        with self._lock:
            if self._closed:
                link.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # the system lets this process have no more
                log.warning("no thread for an express connection: %s", error)
                link.close()
                return
            self._threads[link] = thread

    def close(self) -> None:
        """Ends all connections, and waits; what was asked completely may still be answered. The loop must run."""
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
        except Exception:  # a bug ends one connection; its client goes the long way
            log.exception("an express connection ended")
        finally:
            with self._lock:
                del self._threads[link]
                link.close()
