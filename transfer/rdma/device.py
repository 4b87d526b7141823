"""RDMA device ports and GIDs of this host, from sysfs alone, and the interface of an opened device.

A port is usable if it is active and has an address that peers can route to. On Ethernet that is a RoCE v2 GID,
IPv4-mapped if there is one (UDP over the host's own addressing); on InfiniBand it is the first GID. `moonserve doctor`
reports the ports without pyverbs, so this module does not import it.

`verbs.py` and the tests implement the interface: memory regions, queue pairs, completions. Its rule: no call blocks,
and after `QueuePair.close` neither side's bytes move over that pair.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from moonserve.protocol.errors import ConfigError
from moonserve.transfer.paths.hardware_discovery import SYSFS, read_machine, read_text
from moonserve.transfer.paths.topology import Device

_ROCE_V2 = "RoCE v2"
_MAX_HOLE = 64
"""Consecutive unused entries after which the table is taken to end: the kernel fills the first free entry."""


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    raw: bytes
    kind: str
    """Type of the GID: "RoCE v2" or "IB/RoCE v1"."""
    netdev: str | None

    @property
    def address(self) -> ipaddress.IPv6Address:
        return ipaddress.IPv6Address(self.raw)

    @property
    def ip(self) -> str:
        """The address in the form that a socket accepts."""
        return str(self.address.ipv4_mapped or self.address)

    def __str__(self) -> str:
        on = f" on {self.netdev}" if self.netdev else ""
        return f"GID {self.index} {self.kind} {self.ip}{on}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of one device, with the GID chosen for it."""

    device: str
    number: int
    state: str
    """State of the port, for example "ACTIVE" or "DOWN"."""
    is_ethernet: bool
    gid: Gid | None
    bandwidth_bytes_s: float | None
    numa_node: int | None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def usable(self) -> bool:
        return self.state == "ACTIVE" and self.gid is not None

    def __str__(self) -> str:
        link = "Ethernet" if self.is_ethernet else "InfiniBand"
        speed = f", {self.bandwidth_bytes_s * 8e-9:g} Gb/s" if self.bandwidth_bytes_s else ""
        numa = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        return f"{self.name} {self.state.lower()} {link}{speed}{numa}, {self.gid or 'no usable GID'}"


def discover_ports(sysfs: Path = SYSFS) -> list[Port]:
    """Returns all ports of all devices, usable or not, sorted by name."""
    known = read_machine(sysfs).devices
    found = (sysfs / "class/infiniband").glob("*/ports/*")
    ports = [_port(path, known) for path in found if path.name.isdigit()]
    return sorted(ports, key=lambda port: (port.device, port.number))


def choose_ports(ports: Sequence[Port], wanted: Sequence[str]) -> list[Port]:
    """Returns the ports that `wanted` names ("mlx5_0:1", or "mlx5_0" for its only port), or all usable ones if it is
    empty.

    Raises ConfigError if a named port cannot be used or none is left.
    """
    chosen = [_named(ports, name) for name in wanted]
    if not wanted:
        chosen = [port for port in ports if port.usable]
    if not chosen:
        listed = "; ".join(map(str, ports)) or "the kernel has none (is the driver loaded?)"
        raise ConfigError(f"rdma: no device port can be used: {listed}")
    return chosen


def _named(ports: Sequence[Port], name: str) -> Port:
    matches = [port for port in ports if name in (port.name, port.device)]
    if len(matches) != 1:
        listed = ", ".join(port.name for port in ports) or "none"
        raise ConfigError(f"rdma: rail {name!r} is not one of the device ports: {listed}")
    if not matches[0].usable:
        raise ConfigError(f"rdma: rail {name!r} cannot be used: {matches[0]}")
    return matches[0]


def best_gid(gids: Sequence[Gid], *, is_ethernet: bool) -> Gid | None:
    """Returns the preferred GID. On Ethernet it excludes RoCE v1, which does not leave its segment, and link-local
    GIDs, which need a scope."""
    if not is_ethernet:
        return gids[0] if gids else None
    routable = [gid for gid in gids if gid.kind == _ROCE_V2]
    mapped = [gid for gid in routable if gid.address.ipv4_mapped]
    rest = [gid for gid in routable if not gid.address.is_link_local]
    return next(iter(mapped or rest), None)


def _port(path: Path, known: Mapping[str, Device]) -> Port:
    is_ethernet = read_text(path / "link_layer") == "Ethernet"
    device = path.parents[1].name
    place = known[f"{device}:{path.name}"]
    return Port(
        device=device,
        number=int(path.name),
        state=(read_text(path / "state") or "").partition(": ")[2],
        is_ethernet=is_ethernet,
        gid=best_gid(_gids(path), is_ethernet=is_ethernet),
        bandwidth_bytes_s=place.bandwidth_bytes_s,
        numa_node=place.numa_node,
    )


def _gids(port: Path) -> list[Gid]:
    """Returns the entries in use, by index."""
    found = []
    index = last = 0
    while index <= last + _MAX_HOLE and (text := read_text(port / f"gids/{index}")):
        raw = bytes.fromhex(text.replace(":", ""))
        if any(raw):
            kind = read_text(port / f"gid_attrs/types/{index}") or "InfiniBand"
            netdev = read_text(port / f"gid_attrs/ndevs/{index}") or None
            found.append(Gid(index, raw, kind, netdev))
            last = index
        index += 1
    return found


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device port."""

    max_message_bytes: int
    max_send_requests: int
    max_outstanding_reads: int
    """READs that one queue pair may have in flight, as initiator and as target."""
    path_mtu: int
    """MTU as the verbs enumeration: 1 is 256 bytes, 5 is 4096."""


@dataclass(frozen=True, slots=True)
class PairAddress:
    """Facts about one end of a connected queue pair that the other end needs."""

    number: int
    first_packet: int
    """The 24-bit sequence number of its first packet."""
    gid: bytes
    lid: int
    path_mtu: int
    max_outstanding_reads: int


Runs = Sequence[Sequence[int]]
"""Runs as (remote address, local address, bytes), contiguous at both ends."""


class Completion(NamedTuple):
    """Completion of one work request."""

    token: int
    """Token that the request was posted with."""
    failure: str | None
    """Reason of failure; None on success. After a failure the queue pair is dead."""
    immediate: int | None
    """Number that came with the peer's write; set only for receives."""


class Region(Protocol):
    """Registered memory, pinned until closed."""

    local_key: int
    remote_key: int

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    """Queue that reports the completions of several queue pairs."""

    descriptor: int | None
    """File descriptor that becomes readable on a completion after `arm`; None if the device cannot signal."""

    def poll(self, limit: int) -> list[Completion]: ...
    def arm(self) -> None:
        """Makes the next completion signal `descriptor`. Poll once more after it."""

    def acknowledge(self) -> None:
        """Consumes the signal, so that `descriptor` is no longer readable."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    """A reliable connection with its own send and receive queue."""

    number: int
    first_packet: int
    max_inline_bytes: int
    """Size up to which writes are copied into the request itself."""

    def connect(self, peer: PairAddress) -> None: ...

    def read(self, token: int, runs: Runs, local_key: int, remote_key: int) -> None:
        """Posts one read request per run (at most `CHAIN`). The last one yields a completion."""

    def write(
        self,
        token: int,
        runs: Runs,
        local_key: int,
        remote_key: int,
        immediate: int | None,
    ) -> None:
        """Posts write requests like `read`. With `immediate`, the last one completes a receive of the peer with that
        number."""

    def receive(self, token: int) -> None:
        """Posts a receive, for one write with `immediate`."""

    def fail(self) -> None:
        """Makes the peer's packets bounce from now on and requests in flight fail. May be called from any thread."""

    def close(self) -> None: ...


class RdmaDevice(Protocol):
    """One opened port of a device."""

    port: Port
    lid: int
    """Address on InfiniBand."""
    limits: Limits

    def register(self, address: int, nbytes: int, *, remote_read: bool, remote_write: bool) -> Region:
        """Registers memory. Raises InvalidRequest."""

    def make_completion_queue(self, capacity: int) -> CompletionQueue: ...

    def make_queue_pair(
        self, completions: CompletionQueue, *, send_depth: int, receive_depth: int, serves: bool
    ) -> QueuePair:
        """Creates a queue pair. `serves` lets the peer read and write through it. Raises PeerLost if no more can be
        created."""

    def close(self) -> None: ...


class Fabric(Protocol):
    """All RDMA devices of this host."""

    def ports(self) -> list[Port]:
        """Returns the ports. Raises ConfigError if RDMA is unavailable."""

    def open(self, port: Port) -> RdmaDevice:
        """Opens a port. Raises ConfigError."""


CHAIN = 64
"""Runs per post. One doorbell (on rxe one system call) covers all of them."""
