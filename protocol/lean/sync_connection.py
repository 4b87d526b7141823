"""Client end of a lean connection for threads: a blocking socket whose timeouts follow the call's deadline.

It carries one call at a time, and the caller closes it after any error. It does not know other connections.
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

# Replies to frequent calls are far smaller; a larger one costs another receive.
_BUFFER_BYTES = 64 * 1024
_TIMEVAL = struct.Struct("@ll")
_NEARLY_ALL = 0.9
"""Share of a call's timeout that must be left for the socket's timeout to stay unchanged (`_limit_call`)."""


class SyncConnection:
    """Blocking connection that carries one call at a time."""

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
        except BaseException:  # no caller can close it yet
            self.close()
            raise
        self._events = select.poll()
        self._events.register(self._sock, select.POLLIN)

    def is_quiet(self) -> bool:
        """Returns true if the socket has nothing to read, not even the end of the connection."""
        return not self._events.poll(0)

    def close(self) -> None:
        self._sock.close()

    def detached(self) -> socket.socket:
        """Returns the socket and detaches it from this connection."""
        return socket.socket(fileno=self._sock.detach())

    def exchange(
        self, path: str, payload: bytes, timeout_s: float, give_up_at: float, spin_s: float
    ) -> tuple[int, bytes]:
        """Makes a call and returns the status and payload of the reply."""
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
        """Returns the payload of a frame whose first `num_bytes` are in the buffer; receives the rest."""
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
        except BlockingIOError as error:  # the kernel reports an expired timeout this way
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
        """Sends all bytes: usually one system call, more if the peer reads slowly."""
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
        """Polls for `spin_s` and returns the number of bytes received, or 0. The next receive reports an end."""
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
        """Sets the socket's timeout to the time left, or to `timeout_s` if nearly all of it is left.

        The socket mostly has `timeout_s` already, which saves the system calls."""
        if give_up_at - time.monotonic() > timeout_s * _NEARLY_ALL:
            self._limit_to(timeout_s)
        else:
            self._limit(give_up_at)

    def _limit(self, give_up_at: float) -> None:
        """Sets the socket's timeout to the time left. Raises DeadlineExceeded if there is none."""
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            raise self._too_late()
        self._limit_to(left_s)

    def _limit_to(self, limit_s: float) -> None:
        """Sets the socket's timeout. It is skipped if unchanged, since callers mostly use the same timeout."""
        if limit_s == self._limit_s:
            return
        self._limit_s = limit_s
        # Zero means no timeout.
        micros = max(1, int(limit_s * 1e6))
        limit = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._address} did not reply within the call's deadline")

    def _failure(self, error: OSError) -> MoonserveError:
        """Translates a socket error. The kernel reports an expired timeout as BlockingIOError."""
        return self._too_late() if isinstance(error, BlockingIOError) else self._lost(error)

    def _lost(self, why: OSError | str) -> MoonserveError:
        return PeerLost(f"the connection to {self._address} broke: {why}")


class TlsConnection(SyncConnection):
    """Blocking connection inside TLS. It uses Python's socket timeouts, does not spin and cannot be handed over."""

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
            self._tls.settimeout(max(1e-6, limit_s))  # zero means non-blocking

    def _failure(self, error: OSError) -> MoonserveError:
        if isinstance(error, TimeoutError) and error.errno is None:  # Python's timeout, not the kernel's ETIMEDOUT
            return self._too_late()
        return translated(error) if isinstance(error, ssl.SSLError) else self._lost(error)

    def _lost(self, why: OSError | str) -> MoonserveError:
        if not self._is_proven:
            return PeerLost(f"the connection to {self._address} {IN_HANDSHAKE}: {why}")
        return super()._lost(why)
