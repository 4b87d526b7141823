"""One device port in use: the opened device, the memory registered with it, and sets of its queue pairs.

A segment is registered once per kind of access. The key that lets peers write is made only when a window grants one, so
knowing how to read a segment is no way to write it. A connection whose peer knows a key ends before the key does, since
a device may reuse a key's number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from protocol.errors import InvalidRequest, MoonserveError, PeerLost
from transfer.rdma.control import MAX_GRANTS, pack_pair
from transfer.rdma.fabric import CHAIN, Device, PairAddress, QueuePair, Region
from transfer.segments import Segment


class Told(Protocol):
    """A connection whose peer knows keys."""

    def end(self) -> None:
        """Ends the connection. On return its peer reaches no memory through it."""


class RegisteredMemory:
    """Segments registered with one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._own: dict[Segment, Region] = {}
        self._writable: dict[Segment, Region] = {}
        self._told: dict[Segment, set[Told]] = {}
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

    def readable(self, segment: Segment, told: Told) -> Region:
        """Returns the region whose key is sent to the peer of `told`. The segment is known to be readable."""
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
        """Removes a connection that has ended."""
        with self._lock:
            for connections in self._told.values():
                connections.discard(told)

    def remove(self, segment: Segment) -> None:
        """Deregisters a segment after ending the connections whose peers know a key of it."""
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


_log = logging.getLogger(__name__)

_SEND_DEPTH = 4 * CHAIN
"""Requests that a queue pair holds. While one chain is in flight the next ones are posted."""


class DeviceRail:
    """One device port, shared by its listener and all sessions. Closed when the last use has ended."""

    def __init__(self, device: Device) -> None:
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


class PairSet:
    """The queue pairs of one connection and their shared completion queue."""

    def __init__(self, rail: DeviceRail, count: int, *, serves: bool) -> None:
        device = rail.device
        self._rail = rail
        self.send_depth = 1 if serves else min(_SEND_DEPTH, device.limits.max_send_requests)
        receive_depth = MAX_GRANTS if serves else 1
        self.completions = device.make_completion_queue(count * (self.send_depth + receive_depth))
        self.pairs: list[QueuePair] = []
        try:
            for _ in range(count):
                pair = device.make_queue_pair(
                    self.completions,
                    send_depth=self.send_depth,
                    receive_depth=receive_depth,
                    serves=serves,
                )
                self.pairs.append(pair)
        except BaseException:  # no caller can close it yet
            self.close()
            raise

    def addresses(self) -> bytes:
        """Returns the packed addresses for the peer."""
        device, gid = self._rail.device, self._rail.gid
        return b"".join(pack_pair(pair, gid, device.lid, device.limits) for pair in self.pairs)

    def connect(self, peers: Sequence[PairAddress]) -> None:
        """Connects each pair to the peer's. Raises PeerLost."""
        if len(peers) != len(self.pairs):
            raise PeerLost("the peer has made another number of queue pairs")
        for pair, peer in zip(self.pairs, peers, strict=True):
            pair.connect(peer)

    def fail(self) -> None:
        """Stops all pairs: no byte moves for either side any more. May be called from any thread."""
        for pair in self.pairs:
            with suppress(PeerLost):
                pair.fail()

    def close(self) -> None:
        for pair in self.pairs:
            try:
                pair.close()
            except MoonserveError as error:
                _log.error("a queue pair cannot be destroyed: %s", error)
        self.completions.close()
