"""Serves a node's inline connections: takes them over from the lean server, runs a thread for each, ends them.

A thread answers one request at a time, from and into the node's memory. Compiled code answers gets from the published
index as other processes read it, without the event loop and without the GIL; puts are in `kvstore.node.inline_puts`.
The number of connections is limited, and a client that gets none uses RPCs and the transfer engine. A slow peer only
blocks its own thread, for a bounded time. An object may be replaced while a get sends it: the reader's checksum detects
this.
"""

import contextlib
import ctypes
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np

from moonserve.kvstore.client.node_access import inline_protocol
from moonserve.kvstore.client.node_access.inline_protocol import (
    REQUEST,
    InlineConnection,
    MalformedRequest,
    RequestKind,
)
from moonserve.kvstore.index_layout import IndexMoved
from moonserve.kvstore.node.inline_puts import InlinePuts
from moonserve.kvstore.published_index import Function, KeyIndex, MappedReader, bind_function, index_library
from moonserve.protocol.errors import DeadlineExceeded, Overloaded, PeerLost
from moonserve.protocol.process.native_libraries import C_FLAGS, c_fields, load_library, shared_cache
from moonserve.transfer import Segment
from moonserve.transfer.memory.data_plane import address_of

log = logging.getLogger(__name__)

GETS_SOURCE = Path(__file__).parents[1] / "native" / "inline_gets.c"
MAX_KEYS_PER_GET = 4096
"""Limit of keys per get: 288 KiB of memory per connection. Clients send fewer."""
_HEAD_BYTES = 24
_KEY_BYTES, _ROW_BYTES, _ANSWER_BYTES = 24, 32, 16
_pointer, _int64, _uint64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64


class StopReason(IntEnum):
    """Why `GetServer.serve` returned."""

    OTHER = 1
    """A request arrived that is not answered here: call `GetServer.take_header`."""
    LATE = 2
    HANGUP = 3
    RETIRED = 4
    """The index has moved: call `serve` again with a new reader."""


class _State(ctypes.Structure):
    """State shared with C (`GetServer` of inline_gets.c)."""

    _fields_ = (
        *c_fields(_pointer, "locate mapping request answer pieces"),
        *c_fields(_uint64, "most_keys most_bytes"),
        *c_fields(_int64, "most_ns idle_ns spin_ns filled active_at_ns"),
        ("rest", ctypes.c_int32),
    )


@functools.cache
def answer_gets_function() -> Function:
    """Returns the compiled `answer_gets`. Raises CompilerError."""
    library = load_library(GETS_SOURCE, C_FLAGS, shared_cache())
    return bind_function(library, "answer_gets", ctypes.c_int32, ctypes.c_int32, _pointer)


class GetServer:
    """Answers gets on one socket. Belongs to one thread."""

    def __init__(
        self,
        fd: int,
        *,
        most_bytes: int,
        spin_ns: int,
    ) -> None:
        """`most_bytes`: of values per answer. `spin_ns`: for which it polls for the next request before it sleeps."""
        self._answer_gets = answer_gets_function()
        self._fd = fd
        self._request = np.zeros(_HEAD_BYTES + MAX_KEYS_PER_GET * _KEY_BYTES, np.uint8)
        self._answer = np.zeros(_ANSWER_BYTES + MAX_KEYS_PER_GET * _ROW_BYTES, np.uint8)
        self._pieces = np.zeros((MAX_KEYS_PER_GET + 1, 2), np.uint64)
        self._state = _State(
            locate=index_library().reader_locate_at,
            request=address_of(self._request),
            answer=address_of(self._answer),
            pieces=address_of(self._pieces),
            most_keys=MAX_KEYS_PER_GET,
            most_bytes=most_bytes,
            most_ns=int(MAX_REQUEST_S * 1e9),
            idle_ns=int(IDLE_S * 1e9),
            spin_ns=spin_ns,
        )
        self._at = ctypes.addressof(self._state)

    def serve(self, reader: MappedReader) -> StopReason:
        """Answers gets from this index until there is a reason to stop, which is returned."""
        self._state.mapping = reader.mapping_at
        return StopReason(self._answer_gets(self._fd, self._at))

    def take_header(self) -> bytes:
        """Returns the head of the request that ended `serve` with OTHER. Its body has not been received."""
        self._state.filled = 0
        return self._request[:_HEAD_BYTES].tobytes()


MAX_REQUEST_S = 30.0
"""Limit for one request, whatever its deadline: it occupies a thread and, during a put, reserved memory."""
IDLE_S = 300.0
MAX_CONNECTIONS = 256
"""Limit of threads, most of them asleep. A client uses one connection per concurrent call."""
_RETRY_S = 10.0


class InlineServer:
    """Answers the requests of all connections. `serve` is called for each connection in its own thread."""

    def __init__(self, index: KeyIndex, segment: Segment, storing: InlinePuts) -> None:
        self._index = index
        self._memory = segment.buffer
        self._storing = storing
        self._reader = MappedReader(index.memory, segment.buffer)

    def serve(self, link: InlineConnection) -> None:
        """Answers until the connection ends. Raises PeerLost, or DeadlineExceeded for a slow or idle peer."""
        gets = GetServer(link.fileno(), most_bytes=inline_protocol.MAX_BYTES, spin_ns=link.spin_ns)
        while True:
            head = self._serve_gets(gets)
            kind, pin, tenant_bytes, count, deadline_ms, _, nbytes = REQUEST.unpack(head)
            if count > inline_protocol.MAX_KEYS or nbytes > inline_protocol.MAX_BYTES:
                raise MalformedRequest("the request is too large")
            give_up_at = time.monotonic() + min(deadline_ms / 1000, MAX_REQUEST_S)
            if kind != RequestKind.PUT:
                raise MalformedRequest(f"the request has the unknown kind {kind} or too many keys")
            self._storing.put(link, count, nbytes, pin, tenant_bytes, give_up_at)

    def _serve_gets(self, gets: GetServer) -> bytes:
        """Answers gets. Returns the head of the next request that is not a get, or a get that is too large."""
        while (end := gets.serve(self._reader)) is not StopReason.OTHER:
            if end is StopReason.LATE:
                raise DeadlineExceeded("the peer was slow or idle")
            if end is StopReason.HANGUP:
                raise PeerLost("the connection broke")
            with contextlib.suppress(IndexMoved):  # the index grew again: the next `serve` reports it
                self._reader = MappedReader(self._index.memory, self._memory)
        return gets.take_header()


class InlineConnections:
    """All inline connections of a node. Thread-safe. `serve` raises PeerLost or DeadlineExceeded at the end of one."""

    def __init__(self, serve: Callable[[InlineConnection], None], *, max_connections: int = MAX_CONNECTIONS) -> None:
        self._serve = serve
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._threads: dict[InlineConnection, threading.Thread] = {}
        self._closed = False

    def admit(self) -> None:
        """Raises Overloaded if the limit of connections is reached."""
        if self._closed or len(self._threads) >= self._max_connections:
            raise Overloaded("the node has no free inline connection", retry_after_s=_RETRY_S)

    def take_over(self, sock: socket.socket) -> None:
        """Takes over an authenticated connection and starts its thread."""
        try:
            link = InlineConnection(sock)
        except OSError:  # the peer has closed it meanwhile
            sock.close()
            return
        thread = threading.Thread(target=self._run, args=(link,), name="inline", daemon=True)
        with self._lock:
            if self._closed:
                link.close()
                return
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit of threads
                log.warning("no thread for an inline connection: %s", error)
                link.close()
                return
            self._threads[link] = thread

    def close(self) -> None:
        """Ends all connections and waits for their threads, which may still answer complete requests. Meanwhile the
        event loop must run."""
        with self._lock:
            self._closed = True
            threads = dict(self._threads)
        for link in threads:
            link.shut()
        for thread in threads.values():
            thread.join()

    def _run(self, link: InlineConnection) -> None:
        try:
            with contextlib.suppress(PeerLost, DeadlineExceeded):
                self._serve(link)
        except Exception:  # a bug only ends this connection; its client falls back to RPCs
            log.exception("an inline connection ended")
        finally:
            with self._lock:
                del self._threads[link]
                link.close()
