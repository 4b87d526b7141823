"""A target that knows the cluster token; what it says is the test's affair."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from protocol.errors import MoonserveError
from protocol.machine import boot_id
from tests.patience import NEVER_S
from tests.transfer.conftest import TOKEN
from transfer.address import Address, Rail
from transfer.base import Credentials
from transfer.tcp import handshake
from transfer.tcp.connection import Connection
from transfer.tcp.frames import HEADER_BYTES, Header, decode


class Impostor:
    """Serves one connection after the other with `serve`, until it raises."""

    def __init__(self, serve: Callable[[Connection, Credentials], None], transport: str = "tcp") -> None:
        self._serve = serve
        self._credentials = Credentials(TOKEN.encode(), secrets.token_bytes(16))
        if transport == "shm":
            name = f"moonserve-impostor-{self._credentials.instance.hex()}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{name}")
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            name = f"127.0.0.1:{self._listener.getsockname()[1]}"
        rails = {transport: (Rail(transport, "impostor", name),)}
        self.address = str(Address(self._credentials.instance, boot_id(), rails))
        self._closed = False
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(sock)
            connection.set_deadline(time.monotonic() + NEVER_S)
            with suppress(MoonserveError, OSError):
                self._serve(connection, self._credentials)
            connection.close()


def answering(answer: Callable[[Connection, Header], None], transport: str = "tcp") -> Impostor:
    """Honest in the handshake, and without checksums."""

    def serve(connection: Connection, credentials: Credentials) -> None:
        handshake.respond(connection, credentials, 7, checksums=False)
        while True:
            header = decode(connection.receive_bytes(HEADER_BYTES))
            connection.discard(header.entries * 24)
            answer(connection, header)

    return Impostor(serve, transport)
