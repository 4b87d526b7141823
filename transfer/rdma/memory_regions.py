"""One opened device port and the memory registered with it.

A segment is registered once per kind of access. The key that lets peers write is made only when a window grants one, so
knowing how to read a segment is no way to write it. A connection whose peer knows a key ends before the key does, since
a device may reuse a key's number.
"""

import threading
from typing import Protocol

from moonserve.protocol.errors import InvalidRequest
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.rdma.device import RdmaDevice, Region


class KeyHolder(Protocol):
    """A connection whose peer knows keys."""

    def end(self) -> None:
        """Ends the connection. On return its peer reaches no memory through it."""


class RegisteredMemory:
    """Segments registered with one device. Thread-safe."""

    def __init__(self, device: RdmaDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._own: dict[Segment, Region] = {}
        self._writable: dict[Segment, Region] = {}
        self._holders: dict[Segment, set[KeyHolder]] = {}
        self._removed: set[int] = set()
        """Ids of removed segments, which are never reused. A connection may have found a segment just before its
        removal."""

    def __len__(self) -> int:
        return len(self._own) + len(self._writable)

    def own(self, segment: Segment) -> Region:
        """Returns the region for this host's requests; peers may read it if the segment is readable. Raises
        InvalidRequest for memory that the device cannot reach."""
        with self._lock:
            return self._registered(self._own, segment, remote_write=False)

    def readable(self, segment: Segment, holder: KeyHolder) -> Region:
        """Returns the region whose key is sent to the peer of `holder`. The segment is known to be readable."""
        with self._lock:
            region = self._registered(self._own, segment, remote_write=False)
            self._holders.setdefault(segment, set()).add(holder)
        return region

    def writable(self, segment: Segment, holder: KeyHolder) -> Region:
        with self._lock:
            region = self._registered(self._writable, segment, remote_write=True)
            self._holders.setdefault(segment, set()).add(holder)
        return region

    def forget(self, holder: KeyHolder) -> None:
        """Removes a connection that has ended."""
        with self._lock:
            for holders in self._holders.values():
                holders.discard(holder)

    def remove(self, segment: Segment) -> None:
        """Deregisters a segment after ending the connections whose peers know a key of it."""
        with self._lock:
            self._removed.add(segment.segment_id)
            holders = self._holders.pop(segment, set())
        for holder in holders:
            holder.end()
        with self._lock:
            for regions in (self._own, self._writable):
                region = regions.pop(segment, None)
                if region is not None:
                    region.close()

    def _registered(self, regions: dict[Segment, Region], segment: Segment, *, remote_write: bool) -> Region:
        if segment.segment_id in self._removed:
            raise InvalidRequest(f"segment {segment.segment_id} is not registered")
        region = regions.get(segment)
        if region is None:
            region = regions[segment] = self._device.register(
                segment.base,
                segment.nbytes,
                remote_read=segment.readable and not remote_write,
                remote_write=remote_write,
            )
        return region


class DeviceRail:
    """One device port, shared by its listener and all sessions. Closed when the last use has ended."""

    def __init__(self, device: RdmaDevice) -> None:
        self.device = device
        self.memory = RegisteredMemory(device)
        self._is_listening = True
        self._is_closed = False

    @property
    def gid(self) -> bytes:
        assert self.device.port.gid is not None
        return self.device.port.gid.raw

    def stop_listening(self) -> None:
        """Marks the port as unused by the listener. The engine deregisters the remaining segments next."""
        self._is_listening = False
        self._close_if_unused()

    def remove(self, segment: Segment) -> None:
        self.memory.remove(segment)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._is_listening and not self._is_closed and not len(self.memory):
            self._is_closed = True
            self.device.close()
