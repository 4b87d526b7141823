"""Which segments one device has registered, under which keys, and who was told one.

A segment is registered when it is added, once per kind of access: a key that lets peers write is made
only when a window grants one, so that knowing how to read a segment is no way to write it. Its rule: a
connection that was told a key ends before the key does, since a device may use a key's number again.
"""

from __future__ import annotations

import threading
from typing import Protocol

from protocol.errors import InvalidRequest
from transfer.rdma.fabric import Device, Region
from transfer.segments import Segment


class Told(Protocol):
    """A connection whose peer knows keys."""

    def end(self) -> None:
        """On return its peer reaches no memory through it."""


class RegisteredMemory:
    """Of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._own: dict[Segment, Region] = {}
        self._writable: dict[Segment, Region] = {}
        self._told: dict[Segment, set[Told]] = {}
        self._removed: set[int] = set()
        """Ids, which are never used again: a connection may have found a segment just before."""

    def __len__(self) -> int:
        return len(self._own) + len(self._writable)

    def add(self, segment: Segment) -> None:
        """Raises InvalidRequest for memory that the device cannot reach."""
        self.own(segment)

    def own(self, segment: Segment) -> Region:
        """For this host's requests; peers may read it when the segment is readable."""
        with self._lock:
            return self._registered(self._own, segment, remote_write=False)

    def readable(self, segment: Segment, told: Told) -> Region:
        """To tell the peer of `told`. The segment is known to be readable."""
        with self._lock:
            region = self._registered(self._own, segment, remote_write=False)
            self._told.setdefault(segment, set()).add(told)
        return region

    def writable(self, segment: Segment, told: Told) -> Region:
        with self._lock:
            region = self._registered(self._writable, segment, remote_write=True)
            self._told.setdefault(segment, set()).add(told)
        return region

    def forget(self, told: Told) -> None:
        """It has ended."""
        with self._lock:
            for connections in self._told.values():
                connections.discard(told)

    def remove(self, segment: Segment) -> None:
        """Waits for the connections whose peers know a key of it."""
        with self._lock:
            self._removed.add(segment.segment_id)
            told = self._told.pop(segment, set())
        for connection in told:
            connection.end()
        with self._lock:
            for regions in (self._own, self._writable):
                region = regions.pop(segment, None)
                if region is not None:
                    region.close()

    def _registered(
        self, regions: dict[Segment, Region], segment: Segment, *, remote_write: bool
    ) -> Region:
        if segment.segment_id in self._removed:
            raise InvalidRequest(f"segment {segment.segment_id} is not registered")
        region = regions.get(segment)
        if region is None:
            _require_reachable(segment)
            region = regions[segment] = self._device.register(
                segment.base,
                segment.nbytes,
                remote_read=segment.readable and not remote_write,
                remote_write=remote_write,
            )
        return region


def _require_reachable(segment: Segment) -> None:
    """Device memory would have to be exported as a dma-buf; segments come with a CPU address only."""
    if segment.location.startswith("cuda"):
        raise InvalidRequest(
            f"rdma: {segment} is not in host memory: copy through a pinned segment of the host's"
        )
