"""Byte transport of an express connection, for both ends: sends, receives with a deadline, hashes bytes on arrival.

Its rule: bytes move between the caller's memory and the kernel without a copy, and none moves any more once a call has
returned or raised and the link was closed. Received bytes are hashed, still in the cache, while the rest is in flight.
Knows neither the messages nor the expected checksums.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import time
from collections.abc import Generator, Sequence
from typing import TypeVar

import xxhash

from protocol.checksum import RunningChecksum
from protocol.errors import DeadlineExceeded, PeerLost
from protocol.lean import sockets
from transfer.native import End, Flow, IoVectors, address_of, data_plane, vectors

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields whenever it needs more received bytes, and returns its result."""
_BRIEF_NS = 100_000
_LOOK_UP_S = 0.1
"""Longest wait in compiled code, so that Python can handle signals."""
SPIN_NS = 100_000
"""About the time in which a busy peer answers; a wake-up takes as long (LOG.md, Transfer engine)."""
DISCARD_BYTES = 256 * 1024
LOCAL_BUFFER_BYTES = 4 << 20
"""Holds a whole batch, so that its sender need not be woken in the middle of it."""
LOCAL_CONGESTION = b"reno"
"""Available in every kernel, and without pacing: on a local connection, bbr's pacing only costs two timers per batch,
each an exit of a virtual machine (LOG.md)."""
PIECE_BYTES = 128 * 1024
"""Bytes hashed at a time: fewer system calls than value by value, and still in the cache (LOG.md)."""


class Link:
    """A connected socket. Belongs to one thread at a time; `shut` may be called from any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        _tune(sock)
        self._sock = sock
        self._fd = sock.fileno()
        self._plane = data_plane()
        self._flow = Flow()
        self._events = select.poll()
        self._events.register(sock, select.POLLIN)
        self._said = b""  # kept alive while it is being sent
        self.spin_ns = SPIN_NS

    @property
    def received(self) -> int:
        """Total bytes received on this connection."""
        return self._flow.into.moved

    def fileno(self) -> int:
        """Returns the file descriptor for compiled code, valid until the link is closed."""
        return self._fd

    def send(self, pieces: IoVectors) -> None:
        """Queues memory to be sent by the next `pump`. The caller keeps array and memory alive until it is sent."""
        self._flow.send(pieces)

    def say(self, message: bytes) -> None:
        """Sends a short message at once. A rest, which is rare, is sent by the next `pump`.

        Nothing else may be queued to be sent. A broken link shows in the next `pump`.
        """
        try:
            sent = self._sock.send(message)  # costs a third of a `pump` of one piece
        except OSError:
            sent = 0
        self._flow.state.active_at_ns = time.monotonic_ns()  # so that `pump` spins for the answer
        if sent < len(message):
            self._said = message[sent:]
            self.send(vectors((address_of(self._said), len(self._said))))

    def receive(self, pieces: IoVectors, at_least: int | None = None) -> None:
        """Sets the memory for the next received bytes. `pump` waits for `at_least` of them, by default for all."""
        self._flow.receive(pieces, at_least)

    def wait_for(self, received: int) -> None:
        """Makes `pump` wait until the connection has received this many bytes in total."""
        self._flow.state.wanted = received

    def pump(self, give_up_at: float) -> None:
        """Sends and receives until the awaited bytes have arrived; if none are awaited, until all is sent.

        Raises DeadlineExceeded, PeerLost; the link is unusable then.
        """
        while True:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the peer did not answer within the deadline")
            timeout_ns = int(min(left_s, _LOOK_UP_S) * 1e9)
            end = self._plane.pump(self._fd, self._flow, timeout_ns=timeout_ns, spin_ns=self.spin_ns)
            if end is End.IN_DONE or end is End.OUT_DONE:
                return
            if end is not End.TIMEOUT:
                raise PeerLost("the connection broke")

    def pump_briefly(self) -> bool:
        """Pumps for a fraction of a millisecond at most. Returns False if it is not done. Raises PeerLost."""
        spin_ns = min(self.spin_ns, _BRIEF_NS)
        end = self._plane.pump(self._fd, self._flow, timeout_ns=_BRIEF_NS, spin_ns=spin_ns)
        if end is End.IN_DONE or end is End.OUT_DONE:
            return True
        if end is not End.TIMEOUT:
            raise PeerLost("the connection broke")
        return False

    async def ready(self, give_up_at: float) -> None:
        """Waits in an event loop until the socket is ready. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        late = loop.call_later(max(0.0, give_up_at - time.monotonic()), _end, ready, False)
        loop.add_reader(self._fd, _end, ready, True)
        if not self._flow.out.empty:
            loop.add_writer(self._fd, _end, ready, True)
        try:
            if not await ready:
                raise DeadlineExceeded("the peer did not answer within the deadline")
        finally:
            late.cancel()
            loop.remove_reader(self._fd)
            loop.remove_writer(self._fd)

    def push(self) -> None:
        """Sends as much as possible without waiting. A broken link shows in the next `pump`."""
        self._plane.pump(self._fd, self._flow, timeout_ns=0, spin_ns=0)

    def is_quiet(self) -> bool:
        """Returns True if no bytes and no end of the connection have arrived."""
        return not self._events.poll(0)

    def shut(self) -> None:
        """Shuts the connection down, which ends all waits on it. Thread-safe."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the connection has ended already
            return

    def close(self) -> None:
        self._sock.close()


def finish(steps: Steps[T], link: Link, give_up_at: float) -> T:
    """Runs steps to their end, pumping between them. Returns their result. Raises as `Link.pump`."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        link.pump(give_up_at)


async def finish_in_loop(steps: Steps[T], link: Link, give_up_at: float) -> T:
    """Runs steps like `finish`, in an event loop, which it blocks for a fraction of a millisecond at a time."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        while not link.pump_briefly():
            await link.ready(give_up_at)


def _end(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


def received(link: Link, nbytes: int, give_up_at: float) -> bytearray:
    """Receives and returns the next `nbytes`. Raises as `Link.pump`."""
    data = bytearray(nbytes)
    if nbytes:
        link.receive(vectors((address_of(data), nbytes)))
        link.pump(give_up_at)
    return data


def discard(link: Link, nbytes: int, give_up_at: float) -> None:
    """Receives and drops the next `nbytes`. Raises as `Link.pump`."""
    nowhere = bytearray(min(nbytes, DISCARD_BYTES))
    while nbytes:
        some = min(nbytes, len(nowhere))
        link.receive(vectors((address_of(nowhere), some)))
        link.pump(give_up_at)
        nbytes -= some


def send(link: Link, data: bytes, give_up_at: float) -> None:
    """Sends all of `data`. Raises as `Link.pump`."""
    link.send(vectors((address_of(data), len(data))))
    link.pump(give_up_at)


def millis(left_s: float) -> int:
    """Returns milliseconds, rounded up: the node must not give up before its caller."""
    return math.ceil(left_s * 1000)


def _tune(sock: socket.socket) -> None:
    sockets.tune(sock)
    if sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
        with contextlib.suppress(OSError):  # a Unix socket, or not permitted
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)


def checksums_on_arrival(
    link: Link, values: Sequence[memoryview | None], lengths: Sequence[int], give_up_at: float
) -> list[int]:
    """Returns the checksums of the values that `link` receives next, one after another, once all have arrived.

    A value without memory has checksum 0. Raises as `Link.pump`.
    """
    return finish(hashing(link, values, lengths), link, give_up_at)


def hashing(link: Link, values: Sequence[memoryview | None], lengths: Sequence[int]) -> Steps[list[int]]:
    """Generates the steps of `checksums_on_arrival`."""
    found: list[int] = []
    arrived = end = link.received
    all_end = end + sum(lengths)
    for value, length in zip(values, lengths, strict=True):
        begin, end = end, end + length
        if value is not None and length > PIECE_BYTES:
            found.append((yield from _large(link, value, begin)))
            arrived = link.received
            continue
        if arrived < end:
            link.wait_for(max(end, min(arrived + PIECE_BYTES, all_end)))
            yield
            arrived = link.received
        found.append(0 if value is None else xxhash.xxh3_64_intdigest(value))
    return found


def _large(link: Link, value: memoryview, begin: int) -> Steps[int]:
    running, hashed = RunningChecksum(), 0
    while hashed < len(value):
        wanted = min(hashed + PIECE_BYTES, len(value))
        if link.received < begin + wanted:
            link.wait_for(begin + wanted)
            yield
        arrived = min(link.received - begin, len(value))
        running.add(value[hashed:arrived])
        hashed = arrived
    return running.value
