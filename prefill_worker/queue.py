"""Requests that wait for blocks, in the order in which they get them.

The order is a sequence's `rank`: priority (0 for fcfs), the time of arrival + the seconds that its placement says it
yields (`Placement.rank`, 0 = to nobody, below 0 = it goes before some who came earlier, since its tenant has had less),
arrival. Only what the conductor puts before it can overtake it later than that, so a large request cannot starve behind
small ones; and a head that waits for blocks is not passed by those behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from prefill_worker.sequence import Rank, Sequence
from protocol.ids import RequestId


class RequestQueue:
    """A priority queue whose members can leave from any place."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, RequestId]] = []
        self._waiting: dict[RequestId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence.request_id))

    def head(self) -> Sequence | None:
        """The next one, which stays."""
        while self._heap:
            rank, request_id = self._heap[0]
            sequence = self._waiting.get(request_id)
            if sequence is not None and sequence.rank == rank:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is."""
        del self._waiting[sequence.request_id]
