"""What a client has counted since it was made."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Event(StrEnum):
    """Rare ones: reads that go well are counted by the nodes."""

    CORRUPT = "corrupt_replicas"
    """Found and reported to their node; another replica was tried."""
    FAILOVER = "failovers"
    """A node did not answer and another one was asked."""
    LEASED_READ = "leased_reads"
    """Objects that could not be read without their node's help: on disk, or moving."""
    UNREPORTED = "unreported_reads"
    """Objects whose use was not reported, since there was too much of it."""


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Event] = Counter()

    def count(self, event: Event, times: int = 1) -> None:
        with self._lock:
            self._counts[event] += times

    def all(self) -> Mapping[str, int]:
        with self._lock:
            return MappingProxyType({str(event): self._counts[event] for event in Event})
