"""Moves bytes over one stream socket with deadlines, directly between the kernel and registered memory.

Its rule: no wait is endless: the deadline, `abort` or the peer's hang-up ends it with `PeerLost`. Queued output is sent
while input is awaited, so two ends that both send never block each other. One thread owns a connection; other threads
may only call `abort`. Knows no frames.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NoReturn

import numpy as np

from moonserve.protocol.errors import IntegrityError, PeerLost, StaleLease
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import (
    SEAL_BYTES,
    SHORT_VALUE,
    UNSEALED,
    Flow,
    IoVectors,
    PumpEnd,
    address_of,
    data_plane,
    vectors,
)
from moonserve.transfer.memory.scatter import Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.transport_interface import STEP_S

Guard = AbstractContextManager[None]

STEP_NS = 50_000_000
IDLE_NS = 3_600_000_000_000
SPIN_NS = 300_000
"""More than a sleeping peer needs to answer: with less, both ends of a connection sleep in every wait (LOG.md)."""
_STORE_NS = 1_000_000
"""Longest time that one step of a guarded receive holds the guard."""
_SCRATCH_BYTES = 65536
_MIN_RTT = struct.Struct("=148xI")
"""`tcpi_min_rtt` in `struct tcp_info` (linux/tcp.h): microseconds; all bits are set if there is no sample."""


def no_deadline() -> float | None:
    """A `deadline` that never ends a wait: the connection waits as long as the peer lives."""
    return None


class Connection:
    """A connected or connecting stream socket, which it owns."""

    _hashes = True
    """True if the data plane moves the payloads, which it hashes then."""
    seals = False
    """True if each payload's XXH3-64 follows it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._plane = data_plane()
        self.flow = Flow()
        self._owners: deque[tuple[int, object]] = deque()
        """Objects that own the queued output's memory, each with its number of pieces."""
        self._num_owned_pieces = 0
        self._closing = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._ended = select.poll()
        self._ended.register(sock, select.POLLRDHUP)
        self.deadline: Callable[[], float | None] = no_deadline
        """Returns the monotonic time at which the current wait must end; None: as long as the peer lives."""
        self.tick: Callable[[], None] = lambda: None
        """Called every `STEP_S` of a wait with a deadline. May raise to end the wait."""

    @property
    def descriptor(self) -> int:
        """File descriptor for poll(2), for an owner that also waits for other things."""
        return self._sock.fileno()

    def abort(self) -> None:
        """Shuts the socket down: the owner's current or next wait fails. May be called from any thread."""
        with self._closing, suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._closing:
            self._sock.close()
        self.flow.out.clear()
        self._release_sent()
        if (descriptor := self.flow.take_descriptor()) is not None:
            os.close(descriptor)

    def num_moved(self) -> int:
        """Returns the number of bytes received and sent so far."""
        return self.flow.into.moved + self.flow.out.moved

    def hung_up(self) -> bool:
        """Returns True if the peer is known to be gone. Does not wait."""
        return bool(self._ended.poll(0))  # nothing but POLLRDHUP, POLLHUP, POLLERR and POLLNVAL is reported

    def peer_pid(self) -> int:
        """Returns the pid of the process that was at a Unix socket's other end when it connected."""
        return array.array("i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def round_trip_s(self) -> float | None:
        """Returns the shortest round trip that the kernel has measured on this TCP connection; None without a sample.
        Unlike the mean it does not depend on how fast the peer answers, since the kernel answers to the connect."""
        [micros] = _MIN_RTT.unpack(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size))
        return None if micros == 0xFFFFFFFF else micros / 1e6

    def set_deadline(self, deadline_at: float | None) -> None:
        """Sets a fixed deadline for the following waits."""
        self.deadline = lambda: deadline_at

    def finish_connect(self) -> None:
        """Waits for a pending connect. Raises PeerLost."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while not writable.poll(STEP_S * 1000):
            self.check_deadline()
        if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise PeerLost(f"cannot connect: {os.strerror(code)}")
        self._require_another_end()

    def _require_another_end(self) -> None:
        """Checks that the socket is not connected to itself. Raises PeerLost if it is. If the dialled port is local and
        has no listener, the kernel may choose it as our port, and TCP then connects the socket to itself (RFC 9293,
        simultaneous open). It would await its own answer and never see a hang-up."""
        try:
            mine, theirs = self._sock.getsockname(), self._sock.getpeername()
        except OSError as error:
            raise PeerLost(f"cannot connect: {error.strerror}") from error
        if mine == theirs and self._sock.family != socket.AF_UNIX:
            raise PeerLost("cannot connect: nothing listens there, and the socket connected to itself")

    def queue(self, data: bytes) -> None:
        """Queues output for the next wait."""
        self.flow.out.add(vectors((address_of(data), len(data))))
        self._keep(1, data)

    def queue_payload(self, frame: bytes, segment: Segment, rows: Rows, column: int, nbytes: int) -> None:
        """Queues a frame and the `nbytes` of its rows, and their seal if payloads are sealed."""
        seal, hashed = bytearray(SEAL_BYTES), self._hashes and nbytes > SHORT_VALUE
        before, behind = (address_of(frame), len(frame)), None
        if self.seals:
            behind = address_of(seal), UNSEALED if hashed else SEAL_BYTES
            value = nbytes if hashed else scatter.checksum(segment.buffer, rows, column)
            seal[:] = value.to_bytes(SEAL_BYTES, "little")
            self.flow.state.num_unsealed += hashed
        output = self._plane.iovecs(segment.base, rows, column=column, before=before, behind=behind)
        self.flow.out.add(output)
        self._keep(len(output), (frame, segment, output, seal))

    def _keep(self, num_pieces: int, owners: object) -> None:
        """Keeps the owners of the memory of the last pieces of output until those are sent."""
        out = self.flow.out
        self._owners.append((num_pieces, owners))
        self._num_owned_pieces += num_pieces
        # The queue might never become empty, so owners of sent pieces are released here.
        while self._num_owned_pieces - self._owners[0][0] >= out.count - out.index:
            self._num_owned_pieces -= self._owners.popleft()[0]

    def receive_payload(self, segment: Segment, rows: Rows, column: int, nbytes: int, guard: Guard | None) -> None:
        """Receives the `nbytes` of the rows; each store happens inside `guard` if there is one. Raises IntegrityError
        if they differ from their seal."""
        seal = bytearray(SEAL_BYTES) if self.seals else None
        behind = (address_of(seal), SEAL_BYTES) if seal else None
        into = self._plane.iovecs(segment.base, rows, column=column, behind=behind)
        hashed = seal is not None and self._hashes and nbytes > SHORT_VALUE
        sums = self.flow.hash_values(np.array((nbytes,), np.uint64)) if hashed else None
        self.receive_vectors(into) if guard is None else self.receive_guarded(into, guard)
        if seal:
            with guard or nullcontext():
                found = scatter.checksum(segment.buffer, rows, column) if sums is None else int(sums[0])
            if found != int.from_bytes(seal, "little"):
                raise IntegrityError(f"{nbytes} bytes arrived with a wrong checksum")

    def push(self) -> None:
        """Passes queued output to the kernel as far as possible without waiting. A failure shows in the next wait."""
        self._pump(0)

    def flush(self) -> None:
        """Waits until the kernel has taken all queued output."""
        while not self.flow.out.empty:
            self._step()
        self._release_sent()

    def _release_sent(self) -> None:
        self._owners.clear()
        self._num_owned_pieces = 0

    def send(self, data: bytes, descriptor: int | None = None) -> None:
        """Sends all of `data` before it returns. A descriptor travels with the first bytes."""
        if descriptor is not None:
            self.flush()
            data = data[self._send_descriptor(data, descriptor) :]
        if data:
            self.queue(data)
        self.flush()

    def try_send_descriptor(self, data: bytes, descriptor: int) -> bool:
        """Sends a short message with a descriptor, or returns False and sends nothing if it would have to wait.

        Needed by a sender with answers outstanding: waiting for room while the peer waits to answer is a deadlock.
        """
        if not self.flow.out.empty:
            end = self._pump(0)
            if end in (PumpEnd.HANGUP, PumpEnd.ERROR):
                self.raise_ended(end)
        if not self.flow.out.empty:
            return False
        try:
            sent = self._sock.sendmsg([data], _descriptor_message(descriptor))
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost("the peer has closed the connection") from error
        if sent < len(data):
            self.queue(data[sent:])
        return True

    def receive_vectors(self, into: IoVectors) -> None:
        """Receives until all pieces are filled, in order."""
        if not len(into):
            return
        self.flow.receive(into)
        while self._step() is not PumpEnd.IN_DONE:
            pass

    def receive_guarded(self, into: IoVectors, guard: Guard) -> None:
        """Receives until all pieces are filled; each store happens inside `guard`, in short steps.

        If the guard raises StaleLease, the remaining input is read and discarded before the error is raised.
        """
        if not len(into):
            return
        self.flow.receive(into)
        while True:
            try:
                with guard:
                    end = self._pump(_STORE_NS)
            except StaleLease:
                self.discard_rest()
                raise
            if end is PumpEnd.IN_DONE:
                return
            if end is not PumpEnd.TIMEOUT:
                self.raise_ended(end)
            self._input_within(STEP_S)
            self.check_deadline()  # also if the peer sends a byte now and then

    def _input_within(self, seconds: float) -> bool:
        return bool(self._readable.poll(seconds * 1000))

    def receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        if count:
            self.receive_vectors(vectors((address_of(data), count)))
        return data

    def take_descriptor(self) -> int | None:
        """Returns a descriptor that was received since the last call and gives it to the caller to close."""
        return self.flow.take_descriptor()

    def discard_rest(self) -> None:
        """Receives and drops what is left of the requested input."""
        left = self.flow.state.wanted - self.flow.into.moved
        self.flow.drop_input()
        self.discard(left)

    def discard(self, count: int) -> None:
        """Receives `count` bytes and drops them."""
        while count:
            count -= len(self.receive_bytes(min(count, _SCRATCH_BYTES)))

    def _step(self) -> PumpEnd:
        """Runs the data plane once and raises the error that ends the connection."""
        end = self._pump(IDLE_NS if self.deadline is no_deadline else STEP_NS)
        if end is PumpEnd.TIMEOUT:
            self.check_deadline()
        elif end not in (PumpEnd.IN_DONE, PumpEnd.OUT_DONE):
            self.raise_ended(end)
        return end

    def _pump(self, timeout_ns: int) -> PumpEnd:
        return self._plane.pump(self._sock.fileno(), self.flow, timeout_ns=timeout_ns, spin_ns=SPIN_NS)

    def check_deadline(self) -> None:
        """Calls `tick`. Raises PeerLost if the deadline has passed. Does nothing without a deadline."""
        deadline_at = self.deadline()
        if deadline_at is None:
            return
        if time.monotonic() >= deadline_at:
            raise PeerLost("the peer did not answer in time")
        self.tick()

    def raise_ended(self, end: int) -> NoReturn:
        """Raises the PeerLost of a `PumpEnd`."""
        if end == PumpEnd.HANGUP:
            raise PeerLost("the peer closed the connection")
        raise PeerLost(f"the connection is broken: {os.strerror(self.flow.state.error)}")

    def _send_descriptor(self, data: bytes, descriptor: int) -> int:
        """Sends the descriptor with as much of `data` as fits and returns the number of bytes sent."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while True:
            try:
                return self._sock.sendmsg([data], _descriptor_message(descriptor))
            except BlockingIOError:
                if not writable.poll(STEP_S * 1000):
                    self.check_deadline()
            except OSError as error:
                raise PeerLost("the peer has closed the connection") from error


def _descriptor_message(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
