"""Local memory known to the engine: allocating, registering, and who is using it.

Its rule: a segment that a batch or a window uses cannot be deregistered, and ids are never reused.
Knows no peers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import InvalidRequest
from transfer import buffers
from transfer.buffers import Registrable
from transfer.native import address_of
from transfer.shm.memfd import OwnedMemory


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What an engine tells its peers about one of its segments."""

    segment_id: int
    nbytes: int
    location: str
    readable: bool
    name: str = ""


class Segment:
    """One registered region. `buffer` is its writable memory, format 'B'."""

    __slots__ = (
        "base",
        "buffer",
        "location",
        "memory",
        "name",
        "nbytes",
        "num_users",
        "readable",
        "segment_id",
    )

    def __init__(
        self,
        segment_id: int,
        buffer: memoryview,
        *,
        location: str,
        readable: bool,
        name: str,
        memory: OwnedMemory | None,
    ) -> None:
        self.segment_id = segment_id
        self.buffer = buffer
        self.base = address_of(buffer)
        """Its first byte's address."""
        self.nbytes = buffer.nbytes
        self.location = location
        self.name = name
        self.readable = readable
        """Peers may READ it."""
        self.memory = memory
        """What peers on this host can map; None for memory that the caller brought."""
        self.num_users = 0
        """Batches under way and open windows."""

    def __repr__(self) -> str:
        return f"Segment({self.segment_id}, {self.nbytes} bytes at {self.location})"


class SegmentTable:
    """All segments of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._segments)

    def allocate(
        self,
        nbytes: int,
        location: str,
        *,
        readable: bool,
        name: str = "",
        elastic: bool = False,
    ) -> Segment:
        if nbytes <= 0:
            raise InvalidRequest(f"a segment of {nbytes} bytes", param="nbytes")
        memory = OwnedMemory(nbytes, name, elastic=elastic)
        return self._add(memory.view, location, readable, name, memory)

    def register(
        self, buffer: Registrable, location: str, *, readable: bool, name: str = ""
    ) -> Segment:
        return self._add(buffers.writable(buffer), location, readable, name, None)

    def _add(
        self,
        view: memoryview,
        location: str,
        readable: bool,
        name: str,
        memory: OwnedMemory | None,
    ) -> Segment:
        with self._lock:
            segment = Segment(
                self._next_id, view, location=location, readable=readable, name=name, memory=memory
            )
            self._next_id += 1
            self._segments[segment.segment_id] = segment
        return segment

    def deregister(self, segment: Segment) -> None:
        """Raises InvalidRequest while a batch or a window uses it."""
        with self._lock:
            self._require(segment)
            if segment.num_users:
                raise InvalidRequest(f"{segment} is in use by {segment.num_users} batches/windows")
            del self._segments[segment.segment_id]
        if segment.memory is not None:
            segment.memory.retire()

    def find(self, segment_id: int) -> Segment:
        """Raises InvalidRequest for an id that is not registered."""
        segment = self._segments.get(segment_id)
        if segment is None:
            raise InvalidRequest(f"segment {segment_id} is not registered")
        return segment

    def infos(self) -> list[SegmentInfo]:
        with self._lock:
            segments = list(self._segments.values())
        return [
            SegmentInfo(each.segment_id, each.nbytes, each.location, each.readable, each.name)
            for each in segments
        ]

    def is_registered(self, segment: Segment) -> bool:
        return self._segments.get(segment.segment_id) is segment

    def hold(self, segments: Iterable[Segment]) -> None:
        """All or none. Raises InvalidRequest when one is not registered here."""
        with self._lock:
            for segment in segments:
                self._require(segment)
            for segment in segments:
                segment.num_users += 1

    def release(self, segments: Iterable[Segment]) -> None:
        with self._lock:
            for segment in segments:
                segment.num_users -= 1

    def close(self) -> list[Segment]:
        """Forgets all of them; views that callers still hold stay valid."""
        with self._lock:
            segments, self._segments = list(self._segments.values()), {}
        for segment in segments:
            if segment.memory is not None:
                segment.memory.retire()
        return segments

    def _require(self, segment: Segment) -> None:
        if not self.is_registered(segment):
            raise InvalidRequest(f"{segment} is not registered with this engine")
