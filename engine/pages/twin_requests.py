"""Requests of the Python twin: their records, and those that may be evicted in the order in which they go."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.pages.latency import bucket_of

_SLACK = 64  # stale entries of a line tolerated beyond two per request before it is made anew


@dataclass(slots=True, eq=False)
class Record:
    handle: int
    priority: int
    blocks: list[int] = field(default_factory=list)
    promised: int = 0
    rank: int = 0  # the least is evicted first
    uses: int = 1
    pins: int = 0
    idle: bool = False

    @property
    def high(self) -> int:
        return int(self.priority > 0)

    @property
    def evictable(self) -> bool:
        return self.idle and not self.pins

    @property
    def size(self) -> int:
        return len(self.blocks) + self.promised


class Line:
    """The evictable requests of one class by rank. Entries that no longer hold are skipped when they come up."""

    def __init__(self) -> None:
        self.members: dict[int, Record] = {}
        self._heap: list[tuple[int, int]] = []

    def add(self, record: Record) -> None:
        self.members[record.handle] = record
        if len(self._heap) > 2 * len(self.members) + _SLACK:
            self._heap = [(member.rank, handle) for handle, member in self.members.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (record.rank, record.handle))

    def remove(self, record: Record) -> None:
        self.members.pop(record.handle, None)

    def first(self) -> Record:
        while True:
            rank, handle = self._heap[0]
            record = self.members.get(handle)
            if record is not None and record.rank == rank:
                return record
            heapq.heappop(self._heap)


class Timed:
    """The lock, and how long the allocation under it took, with the wait for it."""

    def __init__(self, lock: threading.Lock, latencies: npt.NDArray[np.uint64]) -> None:
        self._lock = lock
        self._latencies = latencies
        self._begun = time.perf_counter_ns()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._latencies[bucket_of(time.perf_counter_ns() - self._begun)] += np.uint64(1)
        self._lock.release()
