"""Somebody between two engines who sees, and may change, what they send."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from transfer.address import parse


class Relay:
    """Forwards connections to `address`; `tamper` sees each piece that the initiator sends."""

    def __init__(self, address: str, tamper: Callable[[bytes], bytes] = bytes) -> None:
        endpoint = parse(address).rails["tcp"][0].endpoint
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._tamper = tamper
        self._listener = socket.create_server((host, 0))
        self._sockets = [self._listener]
        self.address = address.replace(endpoint, f"{host}:{self._listener.getsockname()[1]}")
        self.seen = bytearray()
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += (near, far)
            for source, sink, change in ((near, far, self._changed), (far, near, bytes)):
                thread = threading.Thread(target=_forward, args=(source, sink, change), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _changed(self, piece: bytes) -> bytes:
        self.seen += piece
        return self._tamper(piece)


def _forward(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    try:
        while piece := source.recv(1 << 20):
            sink.sendall(change(piece))
    except OSError:
        pass
    for sock in (source, sink):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
