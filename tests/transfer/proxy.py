"""TCP proxy between an engine and the port it dials, with faults that a test switches on."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.patience import PATIENCE_S

_STEP_S = 0.01
_CHUNK = 16384
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value with which close sends RST."""


class Towards(StrEnum):
    """Direction in which bytes travel."""

    TARGET = "target"
    INITIATOR = "initiator"


@dataclass
class LinkFault:
    """Fault that strikes when any one connection has carried `at` bytes. It strikes `times` times in total.

    If `every` is set, the next fault comes that many bytes later.
    """

    towards: Towards
    at: int
    times: int = 1
    every: int = 0


class Proxy:
    """Forwards each connection to `endpoint`. The attributes that set its behaviour may be changed from any thread."""

    def __init__(self, endpoint: str, host: str = "127.0.0.1") -> None:
        self.silent = False
        """True: forwards and receives nothing, in either direction."""
        self.bytes_s: float | None = None
        """Rate limit in bytes per second, in each direction."""
        self.flip: LinkFault | None = None
        """Inverts the byte at this position."""
        self.reset: LinkFault | None = None
        """Cuts every connection with RST at both ends."""
        self.hold: LinkFault | None = None
        """Makes the proxy silent from this position on."""
        self.mangle: Callable[[bytearray], bytearray] | None = None
        """Replaces each piece of data on its way to the initiator."""
        self.num_connections = 0
        self.sources: set[str] = set()
        """Addresses from which initiators connected."""
        self.num_bytes = 0
        """Number of bytes received, from both ends."""
        self.seen: bytearray | None = None
        """Bytes sent by the initiator. None: they are not recorded."""
        upstream, _, port = endpoint.rpartition(":")
        self._upstream = (upstream, int(port))
        self._listener = socket.create_server((host, 0))
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, name="proxy")]
        self._threads[0].start()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for thread in self._threads[1:]:
            thread.join()
        self._end_all(reset=False)

    def silence(self) -> None:
        self.silent = True

    def cut(self) -> None:
        """Resets every connection at once."""
        self._end_all(reset=True)

    def vanish(self) -> None:
        """Closes the target's end without notifying the initiator, which receives nothing more."""
        self.silent = True
        with self._lock:
            for _, target in self._pairs:
                _end(target, reset=True)

    def _end_all(self, *, reset: bool) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                _end(sock, reset=reset)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                initiator, (source, _) = self._listener.accept()
                target = socket.create_connection(self._upstream, timeout=PATIENCE_S)
            except OSError:
                continue
            for sock in (initiator, target):
                sock.settimeout(_STEP_S)  # closing a socket sends RST only when no thread is blocked on it
            self.num_connections += 1
            self.sources.add(source)
            with self._lock:
                self._pairs.append((initiator, target))
            for towards, source, to in ((Towards.TARGET, initiator, target), (Towards.INITIATOR, target, initiator)):
                thread = threading.Thread(target=self._forward, args=(towards, source, to))
                self._threads.append(thread)
                thread.start()

    def _forward(self, towards: Towards, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            done = 0
            while data := self._next_of(source):
                self.num_bytes += len(data)
                if self.seen is not None and towards is Towards.TARGET:
                    self.seen += data
                if self.mangle is not None and towards is Towards.INITIATOR:
                    data = self.mangle(data)
                self._harm(data, towards, done)
                done += len(data)
                self._send(to, data)
            if not self._closed.is_set():
                to.shutdown(socket.SHUT_WR)

    def _next_of(self, source: socket.socket) -> bytearray:
        """Returns the next data, or nothing once the stream has ended."""
        while not self._closed.is_set():
            if self.silent:
                self._closed.wait(_STEP_S)
                continue
            with contextlib.suppress(TimeoutError):
                return bytearray(source.recv(_CHUNK))
        return bytearray()

    def _send(self, to: socket.socket, data: bytearray) -> None:
        while data and not self._closed.is_set():
            if self.silent:
                self._closed.wait(_STEP_S)
                continue
            rate = self.bytes_s
            piece = data if rate is None else data[: max(1, int(rate * _STEP_S))]
            if rate is not None and self._closed.wait(len(piece) / rate):
                return
            with contextlib.suppress(TimeoutError):
                del data[: to.send(piece)]

    def _harm(self, data: bytearray, towards: Towards, done: int) -> None:
        if (at := self._due(self.flip, towards, done, len(data))) is not None:
            data[at] ^= 0xFF
        if self._due(self.reset, towards, done, len(data)) is not None:
            self.cut()
        if self._due(self.hold, towards, done, len(data)) is not None:
            self.silent = True

    def _due(self, fault: LinkFault | None, towards: Towards, done: int, count: int) -> int | None:
        with self._lock:
            if fault is None or not fault.times or fault.towards is not towards:
                return None
            if not done <= fault.at < done + count:
                return None
            at, fault.times = fault.at, fault.times - 1
            fault.at += fault.every
            return at - done


def _end(sock: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()
