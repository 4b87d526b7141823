"""A client that reads one stream, knows when each token came, and resumes where its gateway was lost."""

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
    """Begins at once. `body`: of `/v1/completions`, with `return_token_ids`."""

    def __init__(self, port: int, body: dict[str, Any], name: str) -> None:
        """`name`: as the cluster knows the request (X-Request-Id)."""
        super().__init__(daemon=True)
        self.request_name = name
        self.began_at = time.monotonic()
        self.token_at: list[float] = []  # one instant per token
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
        """Tokens so far."""
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
        """Whether it came to its end; else the connection broke, or there was an error."""
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
        """Whether it was the last one."""
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
        """The longest wait for a token that ended after `since`; nobody waits before that for a first one."""
        begin = since if not self.token_at or self.token_at[0] > since else self.began_at
        instants = [begin, *(at for at in self.token_at if at >= begin)]
        gaps = [b - a for a, b in itertools.pairwise(instants) if b > since]
        return max(gaps, default=0.0)
