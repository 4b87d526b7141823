"""Bytes over one stream socket with deadlines, straight between the kernel and registered memory.

Its rule: every wait has an end (the deadline, `abort`, or the peer's hang-up) and comes out as
`PeerLost`. One thread owns a connection; only `abort` may come from others. Knows no frames.
"""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress

from protocol.errors import PeerLost, StaleLease

_STEP_MS = 50.0
"""How often a thread that waits for a silent peer looks up."""
_MAX_IOVECS = 1024  # IOV_MAX
_SCRATCH_BYTES = 65536
_FD_SPACE = socket.CMSG_SPACE(4)
_HUNG_UP = select.POLLHUP | select.POLLERR | select.POLLNVAL | select.POLLRDHUP


def _nothing() -> None:
    pass


class Connection:
    """A connected (or connecting) stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._closing = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._ended = select.poll()
        self._ended.register(sock, select.POLLRDHUP)
        self.deadline_at: float | None = None
        """Monotonic; None waits for as long as the peer lives."""
        self.while_waiting: Callable[[], None] = _nothing
        """Called every `_STEP_MS` of a wait with a deadline; may raise to end it."""

    def abort(self) -> None:
        """Wakes the owner, whose next or current wait fails. Any thread."""
        with self._closing, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            self._sock.close()

    def hung_up(self) -> bool:
        """Whether the peer is known to be gone, without waiting."""
        return any(events & _HUNG_UP for _, events in self._ended.poll(0))

    def finish_connect(self) -> None:
        """Waits for a connect that was begun. Raises PeerLost."""
        self._wait(self._writable)
        if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerLost(f"cannot connect: {os.strerror(code)}")

    def send(self, views: Sequence[bytes | memoryview], fd: int | None = None) -> None:
        """All bytes of all `views`, in order; `fd` travels with the first of them."""
        left = list(views)
        ancillary = _passing(fd)
        first = 0
        while first < len(left):
            try:
                sent = self._sock.sendmsg(left[first : first + _MAX_IOVECS], ancillary)
            except BlockingIOError:
                self._wait(self._writable)
                continue
            except OSError as error:
                raise PeerLost("the peer is gone") from error
            ancillary = []
            first = _advance(left, first, sent)

    def receive(
        self, views: Sequence[memoryview], guard: AbstractContextManager[None] | None = None
    ) -> None:
        """Fills all `views`, in order. Each store into them happens inside `guard`.

        When the guard refuses (StaleLease), what is left is read and thrown away, then it raises.
        """
        left = list(views)
        first = 0
        while first < len(left):
            try:
                count = self._receive_some(left[first : first + _MAX_IOVECS], guard)
            except BlockingIOError:
                self._wait(self._readable)
                continue
            except StaleLease:
                self.discard(sum(view.nbytes for view in left[first:]))
                raise
            first = _advance(left, first, count)

    def _receive_some(
        self, views: list[memoryview], guard: AbstractContextManager[None] | None
    ) -> int:
        try:
            if guard is None:
                count = self._sock.recvmsg_into(views)[0]
            else:
                with guard:
                    count = self._sock.recvmsg_into(views)[0]
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerLost("the peer is gone") from error
        if not count:
            raise PeerLost("the peer closed the connection")
        return count

    def receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        if count:
            self.receive([memoryview(data)])
        return data

    def receive_with_fd(self, count: int) -> tuple[bytearray, int | None]:
        """`count` bytes and the descriptor that came with the first of them, now the caller's."""
        while True:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(
                    count, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                self._wait(self._readable)
            except OSError as error:
                raise PeerLost("the peer is gone") from error
        if not data:
            raise PeerLost("the peer closed the connection")
        fd = _passed(ancillary)
        try:
            return bytearray(data) + self.receive_bytes(count - len(data)), fd
        except PeerLost:
            if fd is not None:
                os.close(fd)
            raise

    def discard(self, count: int) -> None:
        """Reads `count` bytes and throws them away."""
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count:
            self.receive([scratch[:count]])
            count -= min(count, len(scratch))

    def _wait(self, poller: select.poll) -> None:
        if self.deadline_at is None:
            poller.poll()
            return
        while (left_s := self.deadline_at - time.monotonic()) > 0:
            if poller.poll(min(left_s * 1000, _STEP_MS)):
                return
            self.while_waiting()
        raise PeerLost("the peer did not answer in time")


def _advance(views: list[memoryview] | list[bytes | memoryview], first: int, count: int) -> int:
    """Index of the first view that `count` more bytes leave unfinished; that one is cut."""
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = memoryview(views[first])[count:]
    return first


def _passing(fd: int | None) -> list[tuple[int, int, bytes]]:
    if fd is None:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]).tobytes())]


def _passed(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The one descriptor that fits `_FD_SPACE`; the kernel closes what does not fit."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for extra in fds[1:]:
        os.close(extra)
    return fds[0] if fds else None
