"""Log format of every process: plain text by default, or one JSON object per line.

A line about one request carries its id as `request_id`; a line about several carries `request_ids` (`request_extra`,
`requests_extra`). Every process logs the id that the cluster uses. It starts with the client's X-Request-Id, if there
is one; the suffix `.N` marks a further choice and `~N` a further attempt.
"""

import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

# These libraries log every wake-up at level DEBUG. `--log-level debug` is meant for moonserve's own lines.
_VERBOSE_LIBRARIES = ("asyncio", "filelock", "grpc", "httpcore", "httpx", "markdown_it", "urllib3")

_OUTAGE_EVERY_S = 10.0


def request_extra(request_id: str) -> Mapping[str, Any]:
    """Returns the `extra` argument of a log line about one request."""
    return {"request_id": request_id}


def requests_extra(request_ids: Iterable[str]) -> Mapping[str, Any]:
    """Returns the `extra` argument of a log line about several requests."""
    return {"request_ids": list(request_ids)}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with the members of `extra`."""

    def __init__(self, instance_id: str) -> None:
        super().__init__()
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "instance": self._instance_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class HumanFormatter(logging.Formatter):
    """Formats a record as time, level, process, module and message, followed by the request ids, if there are any."""

    def __init__(self, instance_id: str) -> None:
        name = instance_id.replace("%", "%%")
        super().__init__(f"%(asctime)s %(levelname).1s {name} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if request_id := getattr(record, "request_id", ""):
            return f"{text} request_id={request_id}"
        if request_ids := getattr(record, "request_ids", ()):
            return f"{text} request_ids={','.join(request_ids)}"
        return text


def configure(instance_id: str, *, log_format: str, level: str) -> None:
    """Makes the root logger write to stderr. `log_format` is `human` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter(instance_id) if is_json else HumanFormatter(instance_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _VERBOSE_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))


class OutageLog:
    """Warnings of failures that may come with every request: the first one, then one in a while with their number.
    Thread-safe."""

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
            self._next_at, silent, self._num_silent = now + _OUTAGE_EVERY_S, self._num_silent, 0
        more = f" ({silent} more since the last record)" if silent else ""
        self._log.warning(self._message + "%s", request_id, error, more)
