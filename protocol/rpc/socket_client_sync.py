"""Client of socket RPC for threads: one call at a time per connection, one connection per concurrent call."""

import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from moonserve.protocol.errors import DeadlineExceeded, Incompatible, InvalidRequest, MoonserveError, PeerLost
from moonserve.protocol.process.tls import IN_HANDSHAKE, Certificates, require_address, tls_error
from moonserve.protocol.rpc import frames, handshake, socket_addresses
from moonserve.protocol.rpc.frames import MalformedFrame, Status
from moonserve.protocol.rpc.handshake import Initiator
from moonserve.protocol.rpc.socket_client import Deserializer, Serializer, SocketChannel
from moonserve.protocol.rpc.wire import failure_from_bytes

# Replies to frequent calls are far smaller; a larger one costs another receive.
_BUFFER_BYTES = 64 * 1024
_TIMEVAL = struct.Struct("@ll")
_NEARLY_ALL = 0.9
"""Share of a call's timeout that must be left for the socket's timeout to stay unchanged (`_limit_call`)."""


class SyncConnection:
    """Blocking socket that carries one call at a time. Its timeouts follow the call's deadline.

    The caller closes it after any error."""

    def __init__(self, address: str, target: socket_addresses.DialTarget, token: str, deadline_at: float) -> None:
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
            self._limit(deadline_at)
            self._dial(token, deadline_at)
        except BaseException:  # no caller can close it yet
            self.close()
            raise
        self._events = select.poll()
        self._events.register(self._sock, select.POLLIN)

    def is_idle(self) -> bool:
        """Returns true if the socket has nothing to read, not even the end of the connection."""
        return not self._events.poll(0)

    def close(self) -> None:
        self._sock.close()

    def detached(self) -> socket.socket:
        """Returns the socket and detaches it from this connection."""
        return socket.socket(fileno=self._sock.detach())

    def exchange(
        self, path: str, payload: bytes, timeout_s: float, deadline_at: float, spin_s: float
    ) -> tuple[int, bytes]:
        """Makes a call and returns the status and payload of the reply."""
        number = self._numbers.get(path)
        if number is None:
            raise Incompatible(f"the peer has no method {path}")
        self._last_id = call_id = (self._last_id + 1) & frames.MAX_CALL_ID
        self._limit_call(timeout_s, deadline_at)
        self._send(frames.request(call_id, number, timeout_s, payload), deadline_at)
        self._limit_call(timeout_s, deadline_at)
        num_bytes = self._spin(spin_s) if spin_s else 0
        num_bytes = num_bytes or self._receive_into(memoryview(self._buffer))
        while num_bytes < frames.REPLY.size:
            self._limit(deadline_at)
            num_bytes += self._receive_into(memoryview(self._buffer)[num_bytes:])
        length, replied_id, status = frames.REPLY.unpack_from(self._buffer)
        frames.check_length(length, frames.REPLY)
        if replied_id != call_id:
            raise MalformedFrame("the reply belongs to another call")
        return status, self._payload(frames.LENGTH.size + length, num_bytes, deadline_at)

    def _payload(self, frame_bytes: int, num_bytes: int, deadline_at: float) -> bytes:
        """Returns the payload of a frame whose first `num_bytes` are in the buffer; receives the rest."""
        if num_bytes > frame_bytes:
            raise MalformedFrame("bytes follow the reply")
        if num_bytes == frame_bytes:
            return bytes(memoryview(self._buffer)[frames.REPLY.size : frame_bytes])
        whole = bytearray(frame_bytes)
        whole[:num_bytes] = self._buffer[:num_bytes]
        self._fill(memoryview(whole)[num_bytes:], deadline_at)
        return bytes(memoryview(whole)[frames.REPLY.size :])

    def _dial(self, token: str, deadline_at: float) -> None:
        try:
            self._connect(deadline_at)
        except BlockingIOError as error:  # the kernel reports an expired timeout this way
            raise self._too_late() from error
        except OSError as error:
            raise PeerLost(f"{self._address} cannot be reached: {error}") from error
        initiator = Initiator(token, secrets.token_bytes(handshake.NONCE_BYTES))
        self._send(initiator.hello, deadline_at)
        while initiator.needed:
            message = bytearray(initiator.needed)
            self._fill(memoryview(message), deadline_at)
            self._send(initiator.receive(bytes(message)), deadline_at)
        self._numbers = {path: number for number, path in enumerate(initiator.methods)}

    def _connect(self, deadline_at: float) -> None:
        self._sock.connect(self._target)
        socket_addresses.tune_socket(self._sock)

    def _send(self, data: bytes, deadline_at: float) -> None:
        """Sends all bytes: usually one system call, more if the peer reads slowly."""
        sent = self._send_some(data)
        while sent < len(data):
            self._limit(deadline_at)
            sent += self._send_some(memoryview(data)[sent:])

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except OSError as error:
            raise self._failure(error) from error

    def _fill(self, buffer: memoryview, deadline_at: float) -> None:
        filled = 0
        while filled < len(buffer):
            self._limit(deadline_at)
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
        deadline_at = time.perf_counter() + spin_s
        while time.perf_counter() < deadline_at:
            try:
                return self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
            except OSError as error:
                raise self._lost(error) from error
        return 0

    def _limit_call(self, timeout_s: float, deadline_at: float) -> None:
        """Sets the socket's timeout to the time left, or to `timeout_s` if nearly all of it is left.

        The socket mostly has `timeout_s` already, which saves the system calls."""
        if deadline_at - time.monotonic() > timeout_s * _NEARLY_ALL:
            self._limit_to(timeout_s)
        else:
            self._limit(deadline_at)

    def _limit(self, deadline_at: float) -> None:
        """Sets the socket's timeout to the time left. Raises DeadlineExceeded if there is none."""
        left_s = deadline_at - time.monotonic()
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
    """Blocking connection inside TLS. It uses Python's socket timeouts, does not spin and cannot be taken over."""

    def __init__(
        self,
        address: str,
        target: socket_addresses.DialTarget,
        token: str,
        deadline_at: float,
        context: ssl.SSLContext,
    ) -> None:
        self._context = context
        self._is_proven = False
        self._tls: ssl.SSLSocket | None = None
        super().__init__(address, target, token, deadline_at)
        self._is_proven = True

    def is_idle(self) -> bool:
        return super().is_idle() and self._tls is not None and not self._tls.pending()

    def detached(self) -> socket.socket:
        raise InvalidRequest("a connection inside TLS cannot be taken over")

    def _connect(self, deadline_at: float) -> None:
        super()._connect(deadline_at)
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
        return tls_error(error) if isinstance(error, ssl.SSLError) else self._lost(error)

    def _lost(self, why: OSError | str) -> MoonserveError:
        if not self._is_proven:
            return PeerLost(f"the connection to {self._address} {IN_HANDSHAKE}: {why}")
        return super()._lost(why)


# A busy peer answers frequent calls within this time. Waking up on another core costs a large part of it, and on a
# shared core yielding the processor loses nothing (benchmarks/conductor/rpc_transports.py). With several calls in
# flight no thread spins, because they would take time from each other and from the server.
SPIN_S = 100e-6


class SyncChannel(SocketChannel):
    """Channel to one `lean://` address for any number of threads. Call `close` when no thread uses it any more.

    A call is one send and one receive, without an event loop. A connection is closed after any error, which also makes
    the server cancel the call. An idle connection is checked before it is used again, so that a restarted server is
    not mistaken for a lost one.

    `spin_s` is how long a call polls for its reply before it blocks, if no other call is in flight.
    """

    def __init__(
        self,
        address: str,
        cluster_token: str,
        tls: Certificates | None = None,
        *,
        spin_s: float = SPIN_S,
    ) -> None:
        super().__init__(address, cluster_token, tls)
        self._spin_s = spin_s
        self._in_use: set[SyncConnection] = set()
        self._idle: deque[SyncConnection] = deque()  # append and pop are atomic

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def unary_unary(
        self, path: str, request_serializer: Serializer, response_deserializer: Deserializer, **_of_grpc: object
    ) -> Callable[..., Any]:
        """Makes a method for the constructor of a generated stub. Callers must pass `timeout`."""

        def call(request: Any, *, timeout: float, metadata: object = None) -> Any:
            payload = request_serializer(request)
            return response_deserializer(self.call(path, payload, timeout_s=timeout))

        return call

    def call(self, path: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Sends a serialized request and returns the serialized reply.

        Raises the MoonserveError of the handler, PeerLost, DeadlineExceeded, Unauthenticated, Incompatible or
        InvalidRequest.
        """
        deadline_at = time.monotonic() + timeout_s
        connection = self._take(deadline_at)
        self._in_use.add(connection)
        spin_s = self._spin_s if len(self._in_use) == 1 else 0.0
        try:
            status, reply = connection.exchange(path, payload, timeout_s, deadline_at, spin_s)
        except BaseException:  # the next bytes on it may belong to this call
            connection.close()
            raise
        finally:
            self._in_use.discard(connection)
        self._idle.append(connection)
        if status == Status.OK:
            return reply
        raise failure_from_bytes(reply)

    def take_over(self, path: str, *, timeout_s: float) -> socket.socket:
        """Returns the socket of a new connection that the server has transferred to the owner of `path`.

        The caller must close it. Raises like `call`, and Incompatible if the server does not know the path.
        """
        deadline_at = time.monotonic() + timeout_s
        connection = self._dialled(deadline_at)
        try:
            status, reply = connection.exchange(path, b"", timeout_s, deadline_at, self._spin_s)
            if status != Status.OK:
                raise failure_from_bytes(reply)
            return connection.detached()
        except BaseException:  # the next bytes on it may belong to this call
            connection.close()
            raise

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _take(self, deadline_at: float) -> SyncConnection:
        """Returns the most recently used idle connection, because its memory is in cache, or a new one."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._dialled(deadline_at)
            if connection.is_idle():
                return connection
            connection.close()

    def _dialled(self, deadline_at: float) -> SyncConnection:
        if self._tls is None or self._target[0] == socket.AF_UNIX:
            return SyncConnection(self._address, self._target, self._token, deadline_at)
        return TlsConnection(self._address, self._target, self._token, deadline_at, self._tls.initiator)
