"""Inline connections: a small batch in one round trip, its values inline in the request or the response.

Find + READ and Reserve + WRITE + Commit take two and three round trips, and each wakes a sleeping core twice. For
batches of a few MiB this is most of their cost. A connection starts as a lean RPC connection, passes its handshake, and
is then handed to a thread that serves only get and put. All numbers are little-endian:

request   kind u8 · pin u8 · tenant's bytes u16 · count u32 · deadline in ms u32 · 0 u32 · bytes u64
  GET       count keys of 16 · count rooms u64 (maximum bytes of each value); `bytes` = maximum of all values
  PUT       count puts (key 16 · parent 16 · length u64) · tenant · the values, `bytes` in all · count checksums u64
response  status u8 · 0 · count u32 · bytes u64
  GET       count rows (offset u64 · length u32 · status u32 · checksum u64 · generation u64) · the values SENT
  PUT       count outcomes u8 (`kvstore.state.objects.PutOutcome`)
  FAILURE   `bytes` of a common.Failure

One request is in flight at a time. A violation of the format ends the connection.
"""

import asyncio
import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from enum import IntEnum
from typing import TypeVar, cast

import numpy as np

from moonserve.protocol.errors import DeadlineExceeded, PeerLost
from moonserve.protocol.kv_blocks import KEY_BYTES
from moonserve.protocol.rpc import socket_addresses
from moonserve.transfer.memory.data_plane import (
    SHORT_VALUE,
    Flow,
    IoVectors,
    PumpEnd,
    Words,
    address_of,
    data_plane,
    vectors,
)

INLINE_METHOD = "/moonserve.KvStore!express"
"""Name under which a lean server offers the switch to an inline connection. No RPC method can have this name."""

REQUEST = struct.Struct("<BBHIIIQ")
RESPONSE = struct.Struct("<BxxxIQ")
_PUT_ROW = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQ")
PUT_ROW_BYTES = _PUT_ROW.size
ROW_BYTES = 32
CHECKSUM = np.dtype("<u8")
PUT_ROW = np.dtype([("key", f"V{KEY_BYTES}"), ("parent", f"V{KEY_BYTES}"), ("length", "<u8")])

MAX_KEYS = 65_536
MAX_BYTES = 16 * 2**20
"""Bytes of values in one question or answer. Clients use far less; this limits the work a client can cause."""
UNLIMITED = 2**64 - 1
_LENGTH_BITS = 32


class RequestKind(IntEnum):
    GET = 1
    PUT = 2


class ResponseStatus(IntEnum):
    OK = 0
    FAILURE = 1
    """The question was read to its end and refused. The connection stays usable."""


class MalformedRequest(PeerLost):
    """The received bytes violate the protocol. The connection ends."""


def pack_request(
    kind: RequestKind, count: int, deadline_ms: int, nbytes: int, *, pin: int = 0, tenant: bytes = b""
) -> bytes:
    return REQUEST.pack(kind, pin, len(tenant), count, min(deadline_ms, 2**32 - 1), 0, nbytes)


def status_and_length(extent: int) -> tuple[int, int]:
    """Splits the second word of a row."""
    return extent >> _LENGTH_BITS, extent & (1 << _LENGTH_BITS) - 1


def pack_put_rows(keys: Sequence[bytes], parents: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Returns the packed put requests of a PUT. A parent has 16 bytes, zeros for none."""
    return b"".join(map(_PUT_ROW.pack, keys, parents, lengths))  # half the time of filling three columns


T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields whenever it needs more received bytes, and returns its result."""
_BRIEF_NS = 100_000
_MUCH_BYTES = 128 * 1024
"""Bytes in `_BRIEF_NS` of a sender that keeps sending."""
_MAX_NATIVE_WAIT_S = 0.1
"""Longest wait in compiled code, so that Python can handle signals."""
SPIN_NS = 100_000
"""About the time in which a busy peer answers; a wake-up takes as long (LOG.md, Transfer engine)."""
DISCARD_BYTES = 256 * 1024
LOCAL_BUFFER_BYTES = 4 << 20
"""Holds a whole batch, so that its sender need not be woken in the middle of it."""
LOCAL_CONGESTION = b"reno"
"""Available in every kernel, and without pacing: on a local connection, bbr's pacing only costs two timers per batch,
each an exit of a virtual machine (LOG.md)."""


class InlineConnection:
    """Byte transport of either end: sends, receives with a deadline, hashes bytes on arrival.

    Bytes move between the caller's memory and the kernel without a copy, and none moves any more once a call has
    returned or raised and the connection was closed. Received bytes are hashed, still in the cache, while the rest is
    in flight. Belongs to one thread at a time; `shut` may be called from any.
    """

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
        """Queues memory to be sent by the next `transfer`. The caller keeps array and memory alive until it is sent."""
        self._flow.out.add(pieces)

    def send_message(self, message: bytes) -> None:
        """Sends a short message at once. A rest, which is rare, is sent by the next `transfer`.

        Nothing else may be queued to be sent. A broken link shows in the next `transfer`.
        """
        try:
            sent = self._sock.send(message)  # costs a third of a `transfer` of one piece
        except OSError:
            sent = 0
        self._flow.state.active_at_ns = time.monotonic_ns()  # so that `transfer` spins for the answer
        if sent < len(message):
            self._said = message[sent:]
            self.send(vectors((address_of(self._said), len(self._said))))

    def receive(self, pieces: IoVectors, at_least: int | None = None) -> None:
        """Sets the memory for the next received bytes. `transfer` waits for `at_least` of them, by default for all."""
        self._flow.receive(pieces, at_least)

    def hash_values(self, lengths: Words) -> Words:
        """Makes `transfer` receive the next values, of these lengths, and fill the returned array with their checksums,
        except those of up to `SHORT_VALUE` bytes."""
        self.wait_for(self.received + int(lengths.sum()))
        return self._flow.hash_values(lengths)

    def wait_for(self, received: int) -> None:
        """Makes `transfer` wait until the connection has received this many bytes in total."""
        self._flow.state.wanted = received

    def transfer(self, give_up_at: float) -> None:
        """Sends and receives until the awaited bytes have arrived; if none are awaited, until all is sent.

        Raises DeadlineExceeded, PeerLost; the link is unusable then.
        """
        while True:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the peer did not answer within the deadline")
            timeout_ns = int(min(left_s, _MAX_NATIVE_WAIT_S) * 1e9)
            end = self._plane.pump(self._fd, self._flow, timeout_ns=timeout_ns, spin_ns=self.spin_ns)
            if end is PumpEnd.IN_DONE or end is PumpEnd.OUT_DONE:
                return
            if end is not PumpEnd.TIMEOUT:
                raise PeerLost("the connection broke")

    def transfer_briefly(self) -> bool:
        """Pumps while much arrives in each fraction of a millisecond. Returns False if it is not done. Raises
        PeerLost."""
        spin_ns = min(self.spin_ns, _BRIEF_NS)
        while True:
            before = self.received
            end = self._plane.pump(self._fd, self._flow, timeout_ns=_BRIEF_NS, spin_ns=spin_ns)
            if end is PumpEnd.IN_DONE or end is PumpEnd.OUT_DONE:
                return True
            if end is not PumpEnd.TIMEOUT:
                raise PeerLost("the connection broke")
            if self.received - before < _MUCH_BYTES:
                return False

    async def ready(self, give_up_at: float) -> None:
        """Waits in an event loop until the socket is ready. Raises DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        late = loop.call_later(max(0.0, give_up_at - time.monotonic()), _set_result, ready, False)
        loop.add_reader(self._fd, _set_result, ready, True)
        if not self._flow.out.empty:
            loop.add_writer(self._fd, _set_result, ready, True)
        try:
            if not await ready:
                raise DeadlineExceeded("the peer did not answer within the deadline")
        finally:
            late.cancel()
            loop.remove_reader(self._fd)
            loop.remove_writer(self._fd)

    def send_without_waiting(self) -> None:
        """Sends as much as possible without waiting. A broken link shows in the next `transfer`."""
        self._plane.pump(self._fd, self._flow, timeout_ns=0, spin_ns=0)

    def is_idle(self) -> bool:
        """Returns True if no bytes and no end of the connection have arrived."""
        return not self._events.poll(0)

    def shut(self) -> None:
        """Shuts the connection down, which ends all waits on it. Thread-safe."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def run_steps(steps: Steps[T], link: InlineConnection, give_up_at: float) -> T:
    """Runs steps to their end, pumping between them. Returns their result. Raises as `InlineConnection.transfer`."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("T", done.value)
        link.transfer(give_up_at)


async def run_steps_in_loop(steps: Steps[T], link: InlineConnection, give_up_at: float) -> T:
    """Runs steps like `finish`, in an event loop, which it blocks for a fraction of a millisecond at a time."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return cast("T", done.value)
        while not link.transfer_briefly():
            await link.ready(give_up_at)


def _set_result(future: asyncio.Future[bool], result: bool) -> None:
    if not future.done():
        future.set_result(result)


def receive_exactly(link: InlineConnection, nbytes: int, give_up_at: float) -> bytearray:
    """Receives and returns the next `nbytes`. Raises as `InlineConnection.transfer`."""
    data = bytearray(nbytes)
    if nbytes:
        link.receive(vectors((address_of(data), nbytes)))
        link.transfer(give_up_at)
    return data


def discard(link: InlineConnection, nbytes: int, give_up_at: float) -> None:
    """Receives and drops the next `nbytes`. Raises as `InlineConnection.transfer`."""
    nowhere = bytearray(min(nbytes, DISCARD_BYTES))
    while nbytes:
        some = min(nbytes, len(nowhere))
        link.receive(vectors((address_of(nowhere), some)))
        link.transfer(give_up_at)
        nbytes -= some


def send(link: InlineConnection, data: bytes, give_up_at: float) -> None:
    """Sends all of `data`. Raises as `InlineConnection.transfer`."""
    link.send(vectors((address_of(data), len(data))))
    link.transfer(give_up_at)


def millis(left_s: float) -> int:
    """Returns milliseconds, rounded up: the node must not give up before its caller."""
    return math.ceil(left_s * 1000)


def _tune(sock: socket.socket) -> None:
    socket_addresses.tune_socket(sock)
    if sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
        with contextlib.suppress(OSError):  # a Unix socket, or not permitted
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION)


def hash_on_arrival(link: InlineConnection, lengths: Words, checksum_of: Callable[[int], int]) -> Steps[list[int]]:
    """Receives the next values, of these lengths back to back, and returns their checksums.

    `checksum_of` returns the checksum of one short value that has arrived, by its place.
    """
    sums = link.hash_values(lengths)
    yield
    checksums: list[int] = sums.tolist()
    for place in np.flatnonzero(lengths <= SHORT_VALUE).tolist():
        checksums[place] = checksum_of(place)
    return checksums
