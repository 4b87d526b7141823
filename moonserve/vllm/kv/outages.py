"""Log records of failures that may come with every request: the first one, then one in a while with their number."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0


class OutageLog:
    """Thread-safe."""

    def __init__(self, log: logging.Logger, message: str) -> None:
        """`message` has two %s: the request and the error."""
        self._log = log
        self._message = message
        self._lock = threading.Lock()
        self._next_at = 0.0
        self._num_silent = 0

    def failed(self, request_id: str, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next_at:
                self._num_silent += 1
                return
            self._next_at, silent, self._num_silent = now + _EVERY_S, self._num_silent, 0
        more = f" ({silent} more since the last record)" if silent else ""
        self._log.warning(self._message + "%s", request_id, error, more)
