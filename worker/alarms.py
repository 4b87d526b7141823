"""What a state remembers of time: instants at which something may be due, and cancellations that came too early."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from protocol.ids import RequestId

# Far longer than a submission or a handoff can be under way, short enough to forget.
KEPT_S = 60.0


class Alarms:
    """Instants and who looks then whether something is due. Nothing is ever unset: whoever looks finds out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # breaks ties in order of setting

    @property
    def next_at(self) -> float | None:
        """The earliest alarm; None = no alarm is set."""
        return self._heap[0][0] if self._heap else None

    def set(self, at: float, look: Callable[..., None], *what: Any) -> None:
        """`look` is called with `what` and what `ring` is given."""
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, look, what))

    def ring(self, now: float, *context: Any) -> None:
        """Looks at all that is due, earliest first."""
        while self._heap and self._heap[0][0] <= now:
            _, _, look, what = heapq.heappop(self._heap)
            look(*what, now, *context)


class Tombstones:
    """Memory of cancellations that overtook their requests, each kept for `KEPT_S`.

    A request that was here a moment ago leaves none when it is cancelled late: its id may come back, placed again.
    Dicts keep insertion order, so the oldest come first.
    """

    def __init__(self) -> None:
        self._cancelled: dict[RequestId, float] = {}
        self._seen: dict[RequestId, float] = {}

    def put(self, request_id: RequestId, now: float) -> None:
        """A cancellation of an unknown request."""
        self._expire(now)
        if request_id not in self._seen:
            self._cancelled.setdefault(request_id, now)

    def take(self, request_id: RequestId, now: float) -> bool:
        """Whether a request that arrives now was cancelled before."""
        self._expire(now)
        return self._cancelled.pop(request_id, None) is not None

    def seen(self, request_id: RequestId, now: float) -> None:
        """The request was here."""
        self._expire(now)
        self._seen.pop(request_id, None)
        self._seen[request_id] = now

    def _expire(self, now: float) -> None:
        for entries in (self._cancelled, self._seen):
            while entries:
                oldest = next(iter(entries))
                if entries[oldest] + KEPT_S > now:
                    break
                del entries[oldest]
