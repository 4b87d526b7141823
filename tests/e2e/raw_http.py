"""HTTP by hand, for clients that no library would be: that leave, send rubbish, or hardly read."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any

from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S


class RawClient:
    """One connection to the cluster's endpoint."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        receive_buffer: int | None = None,
    ) -> None:
        self._headers = cluster.headers
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        if receive_buffer is not None:  # before connecting, or the window is agreed already
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", cluster.port))

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def send(
        self,
        path: str,
        body: bytes,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        lines = {"Host": "test", "Content-Type": "application/json", **self._headers}
        lines |= headers or {}
        lines.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def ask(self, prompt: Any, **parameters: Any) -> None:
        """A streamed completion, of which nothing is read yet. Tokens without text are events too."""
        fixed = {"stream": True, "ignore_eos": True, "return_token_ids": True}
        body = {"prompt": prompt, **fixed, **parameters}
        self.send("/v1/completions", json.dumps(body).encode())

    def reply(self) -> HTTPResponse:
        """The reply with its head read."""
        response = HTTPResponse(self.socket)
        response.begin()
        return response

    def leave(self) -> None:
        """Closes the connection, whatever is still under way."""
        self.socket.close()


def read_events(response: HTTPResponse, count: int) -> list[dict[str, Any]]:
    """The next `count` events of a stream."""
    events: list[dict[str, Any]] = []
    while len(events) < count:
        line = response.readline()
        assert line, f"the stream ended after {events}"
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            events.append(json.loads(line.removeprefix(b"data: ")))
    return events
