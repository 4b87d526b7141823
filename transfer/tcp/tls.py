"""A `Connection` inside TLS 1.3: the same waits and deadlines, with records in place of plain bytes.

Its rule: a byte reaches registered memory only after its record has been authenticated, straight from
OpenSSL, and nothing is sent before the peer's certificate was verified. Both ends' certificates are
(`protocol.tls`); what follows inside is the handshake with the cluster token, as without TLS. An end of
the stream without a goodbye is a hang-up: frames carry lengths, so nothing can be cut short unseen.

The socket stays a plain one, since `abort` comes from other threads; ciphertext passes through two buffers.
Encryption costs a core several times what the copy does (LOG.md), and it is Python that drives it.
"""

from __future__ import annotations

import ctypes
import errno
import select
import socket
import ssl
import time
from typing import Any

from protocol.errors import MoonserveError, PeerLost
from protocol.tls import require_address, translated
from transfer.native import End, Queue
from transfer.tcp.connection import Connection
from transfer.tcp.frames import ProtocolViolation

_CHUNK_BYTES = 128 << 10
"""Plain bytes that are encrypted, or encrypted ones that are taken from the kernel, at once: 8 records."""


class TlsConnection(Connection):
    """Passes no descriptors; everything else as `Connection`. Raises Unauthenticated in the first wait."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, peer_ip: str | None = None) -> None:
        """`peer_ip`: what an initiator dials; a target has none."""
        super().__init__(sock)
        self._peer_ip = peer_ip
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=peer_ip is None)
        self._established = False
        self._sealed = memoryview(b"")
        """Records that the kernel has not taken yet."""
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
        return bool(self._sealed or self._outgoing.pending) or not self._flow.out.empty

    def _input_within(self, seconds: float) -> bool:
        return bool(self._incoming.pending or self._tls.pending()) or super()._input_within(seconds)

    def _pump(self, timeout_ns: int) -> End:
        try:
            return self._exchange(time.monotonic_ns() + timeout_ns)
        except ssl.SSLError as error:
            self._send_alert()
            raise _translated(error) from error
        except ConnectionResetError:
            return End.HANGUP
        except OSError as error:
            self._flow.state.error = error.errno or errno.EIO
            return End.ERROR

    def _exchange(self, deadline_ns: int) -> End:
        """As `pump` of data_plane.c, with records on the way."""
        flow, broken = self._flow, False
        flow.out.advance(0)
        flow.into.advance(0)
        receiving = flow.wants_input
        while True:
            opened = self._open_records()
            if receiving and not flow.wants_input:
                return End.IN_DONE
            received = self._receive() if receiving or not self._established else None
            if received == 0:
                return End.HANGUP
            sent = 0
            if not broken:
                try:
                    sent = self._send_records()
                except (BrokenPipeError, ConnectionResetError):
                    broken = True  # there may still be something for us: why it hung up
            if self._established and not receiving and not self._unsent:
                return End.OUT_DONE
            now = time.monotonic_ns()
            if now >= deadline_ns:
                return End.TIMEOUT
            if opened or received or sent:
                continue
            if broken:
                return End.HANGUP
            listening = receiving or not self._established
            ready = select.poll()
            events = select.POLLIN * listening | select.POLLOUT * bool(self._sealed)
            ready.register(self._sock, events)
            ready.poll((deadline_ns - now) / 1e6)

    def _open_records(self) -> int:
        """What has come in goes where it is wanted; the number of plain bytes."""
        flow, before = self._flow, self._flow.into.moved
        try:
            self._shake_hands()
            while flow.wants_input:
                place = _next_piece(flow.into, _CHUNK_BYTES)
                count: Any = self._tls.read(len(place), place)  # bytes, to typeshed
                if not count:
                    raise ConnectionResetError("the peer said goodbye")
                flow.into.advance(count)
        except ssl.SSLWantReadError:
            pass
        return flow.into.moved - before

    def _shake_hands(self) -> None:
        if not self._established:
            self._tls.do_handshake()
            if self._peer_ip:
                require_address(self._tls.getpeercert(), self._peer_ip)
            self._established = True

    def _receive(self) -> int | None:
        """Ciphertext from the kernel: its bytes, 0 at the end of the stream, None when there is none now."""
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
        """Encrypts a chunk of what is queued; handshake messages go as they are."""
        out, room = self._flow.out, _CHUNK_BYTES
        while self._established and room > 0 and not out.empty:
            piece = _next_piece(out, room)
            out.advance(self._tls.write(piece))
            room -= len(piece)
        self._sealed = memoryview(self._outgoing.read())

    def _send_alert(self) -> None:
        """So that the peer learns why, if there is room in its buffer."""
        try:
            self._sock.send(self._outgoing.read(), socket.MSG_NOSIGNAL)
        except OSError:
            return


def _next_piece(queue: Queue, limit: int) -> memoryview:
    """What is left of the first piece, at most `limit` bytes."""
    address, length = queue.array[queue.index].tolist()
    count = min(length - queue.offset, limit)
    return memoryview((ctypes.c_char * count).from_address(address + queue.offset)).cast("B")


def _translated(error: ssl.SSLError) -> MoonserveError:
    failure = translated(error)
    return ProtocolViolation(failure.message) if isinstance(failure, PeerLost) else failure
