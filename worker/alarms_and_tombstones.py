"""Time-dependent parts of a worker's state: alarms, and cancellations that arrive before their requests."""

import heapq
from collections.abc import Callable
from typing import Any

from moonserve.protocol.request import RequestId

# Much longer than a submission or a handoff can be in flight, short enough to bound memory.
TOMBSTONE_TTL_S = 60.0


class Alarms:
    """Callbacks by due time. Alarms are never unset: a callback checks whether anything is still due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # breaks ties in order of setting

    @property
    def next_at(self) -> float | None:
        """Time of the earliest alarm; None = no alarm is set."""
        return self._heap[0][0] if self._heap else None

    def schedule(self, at: float, look: Callable[..., None], *what: Any) -> None:
        """Sets an alarm. `run_due` then calls `look` with `what` and with its own arguments."""
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, look, what))

    def run_due(self, now: float, *context: Any) -> None:
        """Calls the callbacks of all alarms that are due, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, _, look, what = heapq.heappop(self._heap)
            look(*what, now, *context)


class Tombstones:
    """Cancellations that overtook their requests, each kept for `TOMBSTONE_TTL_S`.

    A late cancellation of a request that was here within `TOMBSTONE_TTL_S` leaves no tombstone, because the request may
    be placed again under the same id. Dicts keep insertion order, so the oldest entries come first.
    """

    def __init__(self) -> None:
        self._cancelled: dict[RequestId, float] = {}
        self._seen: dict[RequestId, float] = {}

    def add(self, request_id: RequestId, now: float) -> None:
        """Records the cancellation of a request that is not here."""
        self._expire(now)
        if request_id not in self._seen:
            self._cancelled.setdefault(request_id, now)

    def pop(self, request_id: RequestId, now: float) -> bool:
        """Returns True if a request that arrives now was cancelled before, and removes its tombstone."""
        self._expire(now)
        return self._cancelled.pop(request_id, None) is not None

    def remember_request(self, request_id: RequestId, now: float) -> None:
        """Records that a request was here."""
        self._expire(now)
        self._seen.pop(request_id, None)
        self._seen[request_id] = now

    def has_seen(self, request_id: RequestId, now: float) -> bool:
        """Returns True if a request was here within `TOMBSTONE_TTL_S`."""
        self._expire(now)
        return request_id in self._seen

    def _expire(self, now: float) -> None:
        for entries in (self._cancelled, self._seen):
            while entries:
                oldest = next(iter(entries))
                if entries[oldest] + TOMBSTONE_TTL_S > now:
                    break
                del entries[oldest]
