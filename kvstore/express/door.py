"""A node's express connections: taken over from the lean server, a thread each, ended with the node.

Its rule: there are only so many; who finds no place goes the long way, which needs none.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from kvstore.express.link import Link
from protocol.errors import DeadlineExceeded, Overloaded, PeerLost

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Threads, most of them asleep: one per call that a client makes at once."""
_RETRY_S = 10.0


class Door:
    """Thread-safe. `serve` raises PeerLost or DeadlineExceeded when a connection has ended."""

    def __init__(
        self, serve: Callable[[Link], None], *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
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
        """Ends all of them, and waits; what was asked completely may still be answered. The loop must run."""
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
