"""One device port in use: the opened device, what is registered with it, and sets of its queue pairs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from protocol.errors import MoonserveError, PeerLost
from transfer.rdma.control import MAX_GRANTS, pack_pair
from transfer.rdma.fabric import CHAIN, Device, PairAddress, QueuePair
from transfer.rdma.memory import RegisteredMemory
from transfer.segments import Segment

_log = logging.getLogger(__name__)

_SEND_DEPTH = 4 * CHAIN
"""Requests that a queue pair holds: while one chain is under way the next ones are posted."""


class DeviceRail:
    """Shared by the listener and all sessions of the rail; closed when the last use has ended."""

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
        """The engine closes: what is still registered is deregistered next."""
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
    """The queue pairs of one connection and the completion queue that they share."""

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
        except BaseException:  # nobody has it yet who could close it
            self.close()
            raise

    def addresses(self) -> bytes:
        """To tell the peer."""
        device, gid = self._rail.device, self._rail.gid
        return b"".join(pack_pair(pair, gid, device.lid, device.limits) for pair in self.pairs)

    def connect(self, peers: Sequence[PairAddress]) -> None:
        """Raises PeerLost."""
        if len(peers) != len(self.pairs):
            raise PeerLost("the peer has made another number of queue pairs")
        for pair, peer in zip(self.pairs, peers, strict=True):
            pair.connect(peer)

    def fail(self) -> None:
        """No byte is moved for the peer any more, nor for this side. Any thread."""
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
