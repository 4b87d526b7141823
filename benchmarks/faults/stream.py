"""A client that reads one stream, records the arrival of each token, and resumes if its gateway is lost."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from typing import Any

_RECONNECT_S = 0.05
_GIVE_UP_S = 120.0


class Stream(threading.Thread):
    """Thread that reads one stream; starts itself. `body`: of `/v1/completions`, with `return_token_ids`."""

    def __init__(self, port: int, body: dict[str, Any], name: str) -> None:
        """`name`: the request's X-Request-Id."""
        super().__init__(daemon=True)
        self.request_name = name
        self.began_at = time.monotonic()
        self.token_at: list[float] = []  # arrival time of each token
        self.token_ids: list[int] = []
        self.ids: set[str] = set()
        self.headers: dict[str, str] = {}
        self.error = ""
        self.resumed = 0
        self._port = port
        self._body = {**body, "stream": True, "stream_options": {"include_event_ids": True}}
        self._last_id = ""
        self.start()

    @property
    def count(self) -> int:
        """Number of tokens so far."""
        return len(self.token_at)

    def run(self) -> None:
        give_up_at = self.began_at + _GIVE_UP_S
        while not self._read_once():
            if self.error or time.monotonic() > give_up_at:
                self.error = self.error or "it never came to an end"
                return
            self.resumed += 1
            time.sleep(_RECONNECT_S)

    def _read_once(self) -> bool:
        """Reads one connection. Returns True if the stream ended; False if the connection broke or on an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_GIVE_UP_S)
        headers = {"content-type": "application/json", "x-request-id": self.request_name}
        if self._last_id:
            headers["last-event-id"] = self._last_id
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            reply = connection.getresponse()
            self.headers = self.headers or {k.lower(): v for k, v in reply.getheaders()}
            if reply.status != 200:
                self.error = f"{reply.status} {reply.read().decode(errors='replace')}"
                return False
            return any(self._take(line.decode().rstrip("\n")) for line in reply)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _take(self, line: str) -> bool:
        """Parses a line. Returns True if it ends the stream."""
        field, _, value = line.partition(": ")
        if field == "id":
            self._last_id = value
        elif field == "data":
            if value == "[DONE]":
                return True
            self._add(json.loads(value))
        return False

    def _add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        self.ids.add(chunk["id"])
        for choice in chunk["choices"]:
            new = choice.get("token_ids") or []
            self.token_ids += new
            self.token_at += [time.monotonic()] * len(new)

    def longest_silence_s(self, since: float) -> float:
        """Returns the longest wait for a token that ended after `since`. The first token's starts at `since`."""
        begin = since if not self.token_at or self.token_at[0] > since else self.began_at
        instants = [begin, *(at for at in self.token_at if at >= begin)]
        gaps = [b - a for a, b in itertools.pairwise(instants) if b > since]
        return max(gaps, default=0.0)
