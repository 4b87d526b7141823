"""One connection of a thread that calls: a blocking socket whose time limits are the call's.

Its rule: one call at a time; whoever sees anything go wrong closes it. It knows no other connections.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import ssl
import struct
import time

from protocol.errors import DeadlineExceeded, Incompatible, InvalidRequest, MoonserveError, PeerLost
from protocol.lean import frames, handshake, sockets
from protocol.lean.frames import MalformedFrame
from protocol.lean.handshake import Initiator
from protocol.tls import IN_HANDSHAKE, require_address, translated

# Replies to hot calls are far smaller; a larger one costs another receive.
_BUFFER_BYTES = 64 * 1024
_TIMEVAL = struct.Struct("@ll")
_NEARLY_ALL = 0.9
"""Of a call's time."""


class SyncConnection:
    """A blocking socket whose time limits are the call's."""

    def __init__(self, address: str, target: sockets.SocketAddress, token: str, give_up_at: float) -> None:
        self._address = address
        self._limit_s = 0.0
        self._last_id = 0
        self._buffer = bytearray(_BUFFER_BYTES)
        family, self._target = target
        try:
            self._sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise PeerLost(f"{address} cannot be reached: {error}") from error
        try:
            self._limit(give_up_at)
            self._dial(token, give_up_at)
        except BaseException:  # nobody has it yet who could close it
            self.close()
            raise
        self._events = select.poll()
        self._events.register(self._sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Nothing has arrived, not even its end."""
        return not self._events.poll(0)

    def close(self) -> None:
        self._sock.close()

    def detached(self) -> socket.socket:
        """The socket, which this connection has no more."""
        return socket.socket(fileno=self._sock.detach())

    def exchange(
        self, path: str, payload: bytes, timeout_s: float, give_up_at: float, spin_s: float
    ) -> tuple[int, bytes]:
        """Status and payload of the reply."""
        number = self._numbers.get(path)
        if number is None:
            raise Incompatible(f"the peer has no method {path}")
        self._last_id = call_id = (self._last_id + 1) & frames.MAX_CALL_ID
        self._limit_call(timeout_s, give_up_at)
        self._send(frames.request(call_id, number, timeout_s, payload), give_up_at)
        self._limit_call(timeout_s, give_up_at)
        num_bytes = self._spin(spin_s) if spin_s else 0
        num_bytes = num_bytes or self._receive_into(memoryview(self._buffer))
        while num_bytes < frames.REPLY.size:
            self._limit(give_up_at)
            num_bytes += self._receive_into(memoryview(self._buffer)[num_bytes:])
        length, replied_id, status = frames.REPLY.unpack_from(self._buffer)
        frames.check_length(length, frames.REPLY)
        if replied_id != call_id:
            raise MalformedFrame("a reply to another call")
        return status, self._payload(frames.LENGTH.size + length, num_bytes, give_up_at)

    def _payload(self, frame_bytes: int, num_bytes: int, give_up_at: float) -> bytes:
        """What follows the header in a frame of which the buffer holds the first `num_bytes`."""
        if num_bytes > frame_bytes:
            raise MalformedFrame("more than the reply")
        if num_bytes == frame_bytes:
            return bytes(memoryview(self._buffer)[frames.REPLY.size : frame_bytes])
        whole = bytearray(frame_bytes)
        whole[:num_bytes] = self._buffer[:num_bytes]
        self._fill(memoryview(whole)[num_bytes:], give_up_at)
        return bytes(memoryview(whole)[frames.REPLY.size :])

    def _dial(self, token: str, give_up_at: float) -> None:
        try:
            self._connect(give_up_at)
        except BlockingIOError as error:  # how the kernel tells that the time limit is over
            raise self._too_late() from error
        except OSError as error:
            raise PeerLost(f"{self._address} cannot be reached: {error}") from error
        initiator = Initiator(token, secrets.token_bytes(handshake.NONCE_BYTES))
        self._send(initiator.hello, give_up_at)
        while initiator.needed:
            message = bytearray(initiator.needed)
            self._fill(memoryview(message), give_up_at)
            self._send(initiator.receive(bytes(message)), give_up_at)
        self._numbers = {path: number for number, path in enumerate(initiator.methods)}

    def _connect(self, give_up_at: float) -> None:
        self._sock.connect(self._target)
        sockets.tune(self._sock)

    def _send(self, data: bytes, give_up_at: float) -> None:
        """Usually one call into the kernel; more when the peer reads slowly."""
        sent = self._send_some(data)
        while sent < len(data):
            self._limit(give_up_at)
            sent += self._send_some(memoryview(data)[sent:])

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except OSError as error:
            raise self._failure(error) from error

    def _fill(self, buffer: memoryview, give_up_at: float) -> None:
        filled = 0
        while filled < len(buffer):
            self._limit(give_up_at)
            filled += self._receive_into(buffer[filled:])

    def _receive_into(self, buffer: memoryview) -> int:
        try:
            num_bytes = self._sock.recv_into(buffer)
        except OSError as error:
            raise self._failure(error) from error
        if not num_bytes:
            raise self._lost("closed by the peer")
        return num_bytes

    def _spin(self, spin_s: float) -> int:
        """What has arrived by then; 0 when there is nothing, or its end, which the next wait tells."""
        give_up_at = time.perf_counter() + spin_s
        while time.perf_counter() < give_up_at:
            try:
                return self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
            except OSError as error:
                raise self._lost(error) from error
        return 0

    def _limit_call(self, timeout_s: float, give_up_at: float) -> None:
        """What dialling and sending have left; where that is nearly all, all, which the socket mostly has already."""
        if give_up_at - time.monotonic() > timeout_s * _NEARLY_ALL:
            self._limit_to(timeout_s)
        else:
            self._limit(give_up_at)

    def _limit(self, give_up_at: float) -> None:
        """Raises DeadlineExceeded when no time is left."""
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            raise self._too_late()
        self._limit_to(left_s)

    def _limit_to(self, limit_s: float) -> None:
        """Callers mostly use one and the same limit, which the socket then has already."""
        if limit_s == self._limit_s:
            return
        self._limit_s = limit_s
        # Zero would be no limit at all.
        micros = max(1, int(limit_s * 1e6))
        limit = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._address} did not reply within the call's deadline")

    def _failure(self, error: OSError) -> MoonserveError:
        """The kernel tells by a BlockingIOError that the time limit is over."""
        return self._too_late() if isinstance(error, BlockingIOError) else self._lost(error)

    def _lost(self, why: OSError | str) -> MoonserveError:
        return PeerLost(f"the connection to {self._address} broke: {why}")


class TlsConnection(SyncConnection):
    """The same inside TLS, whose socket keeps time itself; it does not spin, and is handed over to nobody."""

    def __init__(
        self,
        address: str,
        target: sockets.SocketAddress,
        token: str,
        give_up_at: float,
        context: ssl.SSLContext,
    ) -> None:
        self._context = context
        self._is_proven = False
        self._tls: ssl.SSLSocket | None = None
        super().__init__(address, target, token, give_up_at)
        self._is_proven = True

    def is_quiet(self) -> bool:
        return super().is_quiet() and self._tls is not None and not self._tls.pending()

    def detached(self) -> socket.socket:
        raise InvalidRequest("a connection inside TLS cannot be handed over")

    def _connect(self, give_up_at: float) -> None:
        super()._connect(give_up_at)
        self._sock.settimeout(self._limit_s)
        try:
            self._sock = self._tls = self._context.wrap_socket(self._sock)
        except OSError as error:
            raise self._failure(error) from error
        self._limit_s = 0.0
        require_address(self._tls.getpeercert(), self._tls.getpeername()[0])

    def _spin(self, spin_s: float) -> int:
        return 0

    def _limit_to(self, limit_s: float) -> None:
        if self._tls is None:
            super()._limit_to(limit_s)
        else:
            self._tls.settimeout(max(1e-6, limit_s))  # zero would be no waiting, and no timeout

    def _failure(self, error: OSError) -> MoonserveError:
        if isinstance(error, TimeoutError) and error.errno is None:  # not the kernel's ETIMEDOUT
            return self._too_late()
        return translated(error) if isinstance(error, ssl.SSLError) else self._lost(error)

    def _lost(self, why: OSError | str) -> MoonserveError:
        if not self._is_proven:
            return PeerLost(f"the connection to {self._address} {IN_HANDSHAKE}: {why}")
        return super()._lost(why)
