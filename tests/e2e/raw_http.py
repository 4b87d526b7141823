"""HTTP by hand, for clients that no library would be: that leave."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from typing import Any

from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S


class RawClient:
    """One connection to the cluster's endpoint."""

    def __init__(self, cluster: Cluster) -> None:
        self._headers = cluster.headers
        self.socket = socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def ask(self, prompt: Any, **parameters: Any) -> None:
        """A streamed completion, of which nothing is read yet. Tokens without text are events too."""
        fixed = {"stream": True, "ignore_eos": True, "return_token_ids": True}
        body = json.dumps({"prompt": prompt, **fixed, **parameters}).encode()
        lines = {"Host": "test", "Content-Type": "application/json", **self._headers}
        lines["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.socket.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)

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
