"""One express connection, as both of its ends see it: bytes out, bytes in until a deadline, checksums as they arrive.

Its rule: memory goes to and comes from the kernel without a copy between, and nothing of it moves any more once a call
has returned or raised and the link was closed. What has come is hashed, still in the cache, while the rest is on its
way. Knows no questions, and not what the checksums should be.
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
"""Each ends where something has to arrive before the next one."""
_BRIEF_NS = 100_000
_LOOK_UP_S = 0.1
"""So often a wait lets Python see to signals."""
SPIN_NS = 100_000
"""As long as a peer at work needs for its answer; to be woken takes as long (LOG.md, Transfer engine)."""
DISCARD_BYTES = 256 * 1024
LOCAL_BUFFER_BYTES = 4 << 20
"""A whole batch fits, so that its sender need not be woken in the midst of it."""
LOCAL_CONGESTION = b"reno"
"""Every kernel has it, and it does not pace: bbr sets two timers per batch, each an exit of a virtual
machine, for a network that is none (LOG.md)."""
PIECE_BYTES = 128 * 1024
"""Bytes that are hashed at a time: fewer system calls than value by value, and still in the cache (LOG.md)."""


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
        self._said = b""  # kept alive while it is on its way
        self.spin_ns = SPIN_NS

    @property
    def received(self) -> int:
        """Bytes, ever."""
        return self._flow.into.moved

    def fileno(self) -> int:
        """For compiled code that serves it; valid until it is closed."""
        return self._fd

    def send(self, pieces: IoVectors) -> None:
        """They begin to move with the next `pump`. The caller keeps the array and the memory until they are sent."""
        self._flow.send(pieces)

    def say(self, message: bytes) -> None:
        """Sends a short message at once; what is left of it, hardly ever anything, moves with the next `pump`.

        Nothing else may be on its way out. A broken link shows in the next `pump`.
        """
        try:
            sent = self._sock.send(message)  # a third of what a pump costs that moves a single piece
        except OSError:
            sent = 0
        self._flow.state.active_at_ns = time.monotonic_ns()  # the answer is worth spinning for
        if sent < len(message):
            self._said = message[sent:]
            self.send(vectors((address_of(self._said), len(self._said))))

    def receive(self, pieces: IoVectors, at_least: int | None = None) -> None:
        """What comes next goes there; `pump` waits for so many bytes of it, all if none are named."""
        self._flow.receive(pieces, at_least)

    def wait_for(self, received: int) -> None:
        """`pump` is to wait until so many bytes have come, ever."""
        self._flow.state.wanted = received

    def pump(self, give_up_at: float) -> None:
        """Sends, until what is to be waited for has come; without input to wait for, until all is sent.

        Raises DeadlineExceeded, PeerLost; then the link is of no use any more.
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
        """As `pump`, for a fraction of a millisecond at most; False = there is more to wait for."""
        spin_ns = min(self.spin_ns, _BRIEF_NS)
        end = self._plane.pump(self._fd, self._flow, timeout_ns=_BRIEF_NS, spin_ns=spin_ns)
        if end is End.IN_DONE or end is End.OUT_DONE:
            return True
        if end is not End.TIMEOUT:
            raise PeerLost("the connection broke")
        return False

    async def ready(self, give_up_at: float) -> None:
        """Waits in an event loop until there is something to pump. Raises DeadlineExceeded."""
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
        """Sends what can be sent without waiting; a broken link shows in the next `pump`."""
        self._plane.pump(self._fd, self._flow, timeout_ns=0, spin_ns=0)

    def is_quiet(self) -> bool:
        """Nothing has arrived, not even its end."""
        return not self._events.poll(0)

    def shut(self) -> None:
        """Whoever waits for it is told that it has ended."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            return

    def close(self) -> None:
        self._sock.close()


def finish(steps: Steps[T], link: Link, give_up_at: float) -> T:
    """What the steps come to; between two of them, what was asked for arrives. Raises as `Link.pump`."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        link.pump(give_up_at)


async def finish_in_loop(steps: Steps[T], link: Link, give_up_at: float) -> T:
    """As `finish`, for an event loop, which it does not hold up for longer than a peer at work needs."""
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
    """The next so many bytes. Raises as `Link.pump`."""
    data = bytearray(nbytes)
    if nbytes:
        link.receive(vectors((address_of(data), nbytes)))
        link.pump(give_up_at)
    return data


def discard(link: Link, nbytes: int, give_up_at: float) -> None:
    """Receives so many bytes for nobody. Raises as `Link.pump`."""
    nowhere = bytearray(min(nbytes, DISCARD_BYTES))
    while nbytes:
        some = min(nbytes, len(nowhere))
        link.receive(vectors((address_of(nowhere), some)))
        link.pump(give_up_at)
        nbytes -= some


def send(link: Link, data: bytes, give_up_at: float) -> None:
    """All of it. Raises as `Link.pump`."""
    link.send(vectors((address_of(data), len(data))))
    link.pump(give_up_at)


def millis(left_s: float) -> int:
    """Rounded up: the node must not give up before its caller."""
    return math.ceil(left_s * 1000)


def _tune(sock: socket.socket) -> None:
    sockets.tune(sock)
    if sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
        with contextlib.suppress(OSError):  # a Unix socket; or not allowed, then it goes as the system wants
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)


def checksums_on_arrival(
    link: Link, values: Sequence[memoryview | None], lengths: Sequence[int], give_up_at: float
) -> list[int]:
    """Checksums of values that `link` was told to receive next, one behind the other; all have arrived when it returns.

    A value without memory is not hashed: 0. Raises as `Link.pump`.
    """
    return finish(hashing(link, values, lengths), link, give_up_at)


def hashing(link: Link, values: Sequence[memoryview | None], lengths: Sequence[int]) -> Steps[list[int]]:
    """Steps that come to the checksums of arriving values (`checksums_on_arrival`)."""
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
