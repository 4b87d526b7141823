"""A `Connection` inside TLS 1.3, with the same waits and deadlines.

Its rule: a byte reaches registered memory only after its record was authenticated, directly from OpenSSL, and nothing
is sent before the peer's certificate was verified. Both ends have certificates (`protocol.process.tls`); the handshake
with the cluster token follows inside. An end of stream without close_notify counts as a hang-up: frames carry their
lengths, so truncation is always noticed.

The socket stays plain since `abort` comes from other threads; ciphertext passes through two buffers. Encryption costs a
core several times as much as the copy (LOG.md), and Python drives it.
"""

import ctypes
import errno
import select
import socket
import ssl
import time
from contextlib import suppress
from typing import Any

from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.process.tls import require_address, tls_error
from moonserve.transfer.memory.data_plane import PumpEnd, Queue
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import ProtocolViolation

_CHUNK_BYTES = 128 << 10
"""Bytes encrypted, or taken from the kernel for decryption, at once: 8 records."""


class TlsConnection(Connection):
    """A `Connection` over TLS that cannot pass descriptors. The first wait raises Unauthenticated."""

    _hashes = False

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, peer_ip: str | None = None) -> None:
        """`peer_ip` is the address that an initiator dials; a target has none."""
        super().__init__(sock)
        self._peer_ip = peer_ip
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=peer_ip is None)
        self._established = False
        self._sealed = memoryview(b"")
        """Encrypted records that the kernel has not taken yet."""
        self._ciphertext = memoryview(bytearray(_CHUNK_BYTES))

    def flush(self) -> None:
        while self._unsent:
            self._step()
        super().flush()

    def close(self) -> None:
        super().close()
        self._sealed = memoryview(b"")

    @property
    def _unsent(self) -> bool:
        return bool(self._sealed or self._outgoing.pending) or not self.flow.out.empty

    def _input_within(self, seconds: float) -> bool:
        return bool(self._incoming.pending or self._tls.pending()) or super()._input_within(seconds)

    def _pump(self, timeout_ns: int) -> PumpEnd:
        try:
            return self._exchange(time.monotonic_ns() + timeout_ns)
        except ssl.SSLError as error:
            with suppress(OSError):  # the alert tells the peer the reason, if the socket's buffer has room
                self._sock.send(self._outgoing.read(), socket.MSG_NOSIGNAL)
            raise _to_error(error) from error
        except ConnectionResetError:
            return PumpEnd.HANGUP
        except OSError as error:
            self.flow.state.error = error.errno or errno.EIO
            return PumpEnd.ERROR

    def _exchange(self, deadline_ns: int) -> PumpEnd:
        """Does what `pump` of data_plane.c does, with TLS records."""
        flow, broken = self.flow, False
        flow.out.advance(0)
        flow.into.advance(0)
        receiving = flow.wants_input
        while True:
            opened = self._open_records()
            if receiving and not flow.wants_input:
                return PumpEnd.IN_DONE
            received = self._receive() if receiving or not self._established else None
            if received == 0:
                return PumpEnd.HANGUP
            sent = 0
            if not broken:
                try:
                    sent = self._send_records()
                except (BrokenPipeError, ConnectionResetError):
                    broken = True  # its reason for hanging up may still be unread
            if self._established and not receiving and not self._unsent:
                return PumpEnd.OUT_DONE
            now = time.monotonic_ns()
            if now >= deadline_ns:
                return PumpEnd.TIMEOUT
            if opened or received or sent:
                continue
            if broken:
                return PumpEnd.HANGUP
            listening = receiving or not self._established
            ready = select.poll()
            events = select.POLLIN * listening | select.POLLOUT * bool(self._sealed)
            ready.register(self._sock, events)
            ready.poll((deadline_ns - now) / 1e6)

    def _open_records(self) -> int:
        """Decrypts received records into the requested places. Returns the number of plain bytes."""
        flow, before = self.flow, self.flow.into.moved
        try:
            self._do_handshake()
            while flow.wants_input:
                place = _next_piece(flow.into, _CHUNK_BYTES)
                count: Any = self._tls.read(len(place), place)  # typeshed declares bytes
                if not count:
                    raise ConnectionResetError("the peer closed the TLS connection")
                flow.into.advance(count)
        except ssl.SSLWantReadError:
            pass
        return flow.into.moved - before

    def _do_handshake(self) -> None:
        if not self._established:
            self._tls.do_handshake()
            if self._peer_ip:
                require_address(self._tls.getpeercert(), self._peer_ip)
            self._established = True

    def _receive(self) -> int | None:
        """Receives ciphertext. Returns the number of bytes, 0 at the end of the stream, None if there is none now."""
        try:
            count = self._sock.recv_into(self._ciphertext)
        except BlockingIOError:
            return None
        self._incoming.write(self._ciphertext[:count])
        return count

    def _send_records(self) -> int:
        if not self._sealed:
            self._seal()
        if not self._sealed:
            return 0
        try:
            count = self._sock.send(self._sealed, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        self._sealed = self._sealed[count:]
        return count

    def _seal(self) -> None:
        """Encrypts a chunk of queued output. Handshake messages pass unchanged."""
        out, room = self.flow.out, _CHUNK_BYTES
        while self._established and room > 0 and not out.empty:
            piece = _next_piece(out, room)
            out.advance(self._tls.write(piece))
            room -= len(piece)
        self._sealed = memoryview(self._outgoing.read())


def _next_piece(queue: Queue, limit: int) -> memoryview:
    """Returns the rest of the first piece, at most `limit` bytes."""
    address, length = queue.array[queue.index].tolist()
    count = min(length - queue.offset, limit)
    return memoryview((ctypes.c_char * count).from_address(address + queue.offset)).cast("B")


def _to_error(error: ssl.SSLError) -> MoonserveError:
    failure = tls_error(error)
    return ProtocolViolation(failure.message) if isinstance(failure, PeerLost) else failure
