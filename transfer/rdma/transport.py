"""The `rdma` transport: one rail per device port, each with its listener.

A port is dialled at a TCP address of its own network interface. That connection carries the handshake and the
agreements about memory; the bytes go through queue pairs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

from protocol.errors import ConfigError, PeerLost
from transfer.address import Address, Rail
from transfer.base import Dial, Hosted
from transfer.rdma import device
from transfer.rdma.fabric import Fabric
from transfer.rdma.rail import DeviceRail
from transfer.rdma.session import RdmaSession
from transfer.rdma.target import RdmaTarget
from transfer.rdma.verbs import VerbsFabric
from transfer.segments import Segment
from transfer.tcp.acceptor import Acceptor
from transfer.tcp.connection import Connection
from transfer.tcp.session import authenticate
from transfer.tcp.transport import listen_on, open_connection, tune_accepted


class RdmaTransport:
    """A `base.Transport` over RDMA. Opens no device before `listen`."""

    name = "rdma"

    def __init__(self, make_fabric: Callable[[], Fabric] = VerbsFabric) -> None:
        self._make_fabric = make_fabric
        self._rails: dict[str, DeviceRail] = {}

    def listen(self, hosted: Hosted) -> Sequence[Acceptor]:
        """Listens on each chosen port. Raises ConfigError without pyverbs, without a usable port, or for an unknown
        rail."""
        fabric = self._make_fabric()
        listeners: list[Acceptor] = []
        try:
            for port in device.choose(fabric.ports(), hosted.options.rdma_rails):
                listeners.append(self._listen_on(fabric, port, hosted))  # noqa: PERF401 - closed below
        except ConfigError:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def _listen_on(self, fabric: Fabric, port: device.Port, hosted: Hosted) -> Acceptor:
        assert port.gid is not None
        host = port.gid.ip if port.is_ethernet else hosted.options.host
        rail = DeviceRail(fabric.open(port))
        try:
            listener, endpoint = listen_on(host)
        except ConfigError:
            rail.stop_listening()
            raise
        self._rails[port.name] = rail
        published = Rail(self.name, port.name, endpoint, port.numa_node, port.bandwidth_bytes_s)
        make = partial(_target, hosted, rail)
        return Acceptor(listener, published, hosted, make, rail.stop_listening)

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails

    def connect(self, dial: Dial) -> RdmaSession:
        rail = self._rails.get(dial.local.name)
        if rail is None:
            raise PeerLost(f"rdma: {dial.local.name} is no rail of this engine")
        connection = open_connection(dial)
        agreed = authenticate(connection, dial)
        try:
            session = RdmaSession(dial, connection, agreed, rail)
        except BaseException:  # no caller can close it
            connection.close()
            raise
        session.meet()
        return session

    def segment_added(self, segment: Segment) -> None:
        for rail in self._rails.values():
            rail.memory.own(segment)

    def segment_removed(self, segment: Segment) -> None:
        for rail in self._rails.values():
            rail.remove(segment)


def _target(hosted: Hosted, rail: DeviceRail, sock: socket.socket) -> RdmaTarget:
    tune_accepted(sock)
    return RdmaTarget(Connection(sock), hosted, rail)
