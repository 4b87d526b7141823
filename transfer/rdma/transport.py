"""The `rdma` transport: one rail per device port, each with its listener.

A port is dialled at a TCP address of its own network interface. That connection carries the handshake and the
agreements about memory; the bytes go through queue pairs.
"""

import socket
from collections.abc import Callable, Sequence
from functools import partial

from moonserve.protocol.errors import ConfigError, PeerLost
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.paths.peer_address import Address, Rail
from moonserve.transfer.rdma.device import Fabric, Port, choose_ports
from moonserve.transfer.rdma.memory_regions import DeviceRail
from moonserve.transfer.rdma.session import RdmaSession
from moonserve.transfer.rdma.target import RdmaTarget
from moonserve.transfer.rdma.verbs import VerbsFabric
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.session import authenticate
from moonserve.transfer.tcp.target import Acceptor
from moonserve.transfer.tcp.transport import listen_on, listen_on_all, open_connection, tune
from moonserve.transfer.transport_interface import Dial, ServedState


class RdmaTransport:
    """A `Transport` over RDMA. Opens no device before `listen`."""

    name = "rdma"

    def __init__(self, make_fabric: Callable[[], Fabric] = VerbsFabric) -> None:
        self._make_fabric = make_fabric
        self._rails: dict[str, DeviceRail] = {}

    def listen(self, state: ServedState) -> Sequence[Acceptor]:
        """Listens on each chosen port. Raises ConfigError without pyverbs, without a usable port, or for an unknown
        rail."""
        fabric = self._make_fabric()
        ports = choose_ports(fabric.ports(), state.options.rdma_rails)
        return listen_on_all(ports, lambda port: self._listen_on(fabric, port, state))

    def _listen_on(self, fabric: Fabric, port: Port, state: ServedState) -> Acceptor:
        assert port.gid is not None
        host = port.gid.ip if port.is_ethernet else state.options.host
        rail = DeviceRail(fabric.open(port))
        try:
            listener, endpoint = listen_on(host)
        except ConfigError:
            rail.stop_listening()
            raise
        self._rails[port.name] = rail
        published = Rail(self.name, port.name, endpoint, port.numa_node, port.bandwidth_bytes_s)
        make = partial(_target, state, rail)
        return Acceptor(listener, published, state, make, rail.stop_listening)

    def reachable(self, address: Address) -> bool:
        return self.name in address.rails

    def connect(self, dial: Dial) -> RdmaSession:
        rail = self._rails.get(dial.local.name)
        if rail is None:
            raise PeerLost(f"rdma: {dial.local.name} is not a rail of this engine")
        connection = open_connection(dial, lambda sock, _: Connection(sock))
        agreed = authenticate(connection, dial)
        try:
            session = RdmaSession(dial, connection, agreed, rail)
        except BaseException:  # no caller can close it
            connection.close()
            raise
        session.connect_pairs()
        return session

    def segment_added(self, segment: Segment) -> None:
        for rail in self._rails.values():
            rail.memory.own(segment)

    def segment_removed(self, segment: Segment) -> None:
        for rail in self._rails.values():
            rail.remove(segment)


def _target(state: ServedState, rail: DeviceRail, sock: socket.socket) -> RdmaTarget:
    tune(sock, sock.getpeername()[0])
    return RdmaTarget(Connection(sock), state, rail)
