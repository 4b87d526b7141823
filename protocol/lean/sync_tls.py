"""A `SyncConnection` inside TLS 1.3: both ends show a certificate before the handshake with the token."""

from __future__ import annotations

import socket
import ssl

from protocol.errors import InvalidRequest, MoonserveError, PeerLost
from protocol.lean import sockets
from protocol.lean.sync_connection import SyncConnection
from protocol.tls import IN_HANDSHAKE, require_address, translated


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

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except OSError as error:
            raise self._failure(error) from error

    def _receive_into(self, buffer: memoryview) -> int:
        try:
            num_bytes = self._sock.recv_into(buffer)
        except OSError as error:
            raise self._failure(error) from error
        if not num_bytes:
            raise self._lost("closed by the peer")
        return num_bytes

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
