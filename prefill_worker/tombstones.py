"""Memory of cancellations that overtook their requests.

A request that ended here a moment ago leaves no tombstone when it is cancelled late: its id may come back, placed
again.
"""

from __future__ import annotations

from protocol.ids import RequestId

# Far longer than a submission can be under way, short enough to forget.
KEPT_S = 60.0


class Tombstones:
    """Each entry is kept for `KEPT_S`. Dicts keep insertion order, so the oldest come first."""

    def __init__(self) -> None:
        self._cancelled: dict[RequestId, float] = {}
        self._ended: dict[RequestId, float] = {}

    def put(self, request_id: RequestId, now: float) -> None:
        """A cancellation of an unknown request."""
        self._expire(now)
        if request_id not in self._ended:
            self._cancelled.setdefault(request_id, now)

    def take(self, request_id: RequestId, now: float) -> bool:
        """Whether a request that arrives now was cancelled before."""
        self._expire(now)
        return self._cancelled.pop(request_id, None) is not None

    def ended(self, request_id: RequestId, now: float) -> None:
        """The request was here and is gone."""
        self._expire(now)
        self._ended.pop(request_id, None)
        self._ended[request_id] = now

    def _expire(self, now: float) -> None:
        for entries in (self._cancelled, self._ended):
            while entries:
                oldest = next(iter(entries))
                if entries[oldest] + KEPT_S > now:
                    break
                del entries[oldest]
