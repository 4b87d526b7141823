"""Reads the machine: sysfs, network addresses (rtnetlink, RFC 3549) and the location of memory.

An absent, unreadable or malformed sysfs file means "unknown", never an error, since virtual machines, containers and
old kernels each omit different files. A published address must belong to this machine, since peers dial it. A TCP rail
has its interface's name, and "eth0/10.0.0.2" for further addresses of that interface. Opens no connection.
"""

import re
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from moonserve.protocol.errors import ConfigError
from moonserve.transfer.paths.peer_address import Rail
from moonserve.transfer.paths.topology import Device, Machine, Topology, decide_topology

SYSFS = Path("/sys")

_BITS_PER_BYTE = 8
_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_PAGES = re.compile(r" N(\d+)=(\d+)")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
"""VGA controller and 3D controller (PCI code and ID assignment)."""


def read_topology(rails: Sequence[Rail], sysfs: Path = SYSFS) -> Topology:
    """Returns the topology matrix of an engine's local rails."""
    return decide_topology(read_machine(sysfs), rails)


def location_of(address: int, proc: Path = Path("/proc/self"), sysfs: Path = SYSFS) -> str:
    """Returns the location "cpu:<NUMA node>" of most pages of the address's mapping, or an empty string if unknown."""
    if len(_numa_distances(sysfs)) == 1:
        return "cpu:0"
    mappings = (read_text(proc / "numa_maps") or "").splitlines()  # sorted by address
    below = [line for line in mappings if int(line.split(" ", 1)[0], 16) <= address]
    counts = {int(node): int(count) for node, count in _PAGES.findall("".join(below[-1:]))}
    return f"cpu:{max(counts, key=counts.__getitem__)}" if counts else ""


def read_machine(sysfs: Path = SYSFS) -> Machine:
    """Reads the NUMA nodes, network interfaces, RDMA ports and GPUs of this machine."""
    devices = [*_interfaces(sysfs), *_rdma_ports(sysfs)]
    return Machine(
        numa_distances=_numa_distances(sysfs),
        devices={device.name: device for device in devices},
        gpus=tuple(_gpus(sysfs)),
    )


def _numa_distances(sysfs: Path) -> dict[int, dict[int, int]]:
    nodes = sorted(int(path.name.removeprefix("node")) for path in (sysfs / "devices/system/node").glob("node[0-9]*"))
    distances: dict[int, dict[int, int]] = {}
    for node in nodes:
        text = read_text(sysfs / f"devices/system/node/node{node}/distance") or ""
        values = [int(word) for word in text.split() if word.isdigit()]
        if len(values) != len(nodes):  # ACPI's defaults when nothing is measured
            values = [10 if other == node else 20 for other in nodes]
        distances[node] = dict(zip(nodes, values, strict=True))
    return distances or {0: {0: 10}}


def _interfaces(sysfs: Path) -> Iterator[Device]:
    for path in _entries(sysfs / "class/net"):
        megabits = _number(path / "speed")  # −1 on virtual links, EINVAL without a carrier
        bandwidth = megabits * 1e6 / _BITS_PER_BYTE if megabits and megabits > 0 else None
        yield _device(sysfs, path.name, _hardware_of(path), bandwidth)


def _rdma_ports(sysfs: Path) -> Iterator[Device]:
    for path in _entries(sysfs / "class/infiniband"):
        hardware = path
        parent = read_text(path / "parent")  # Soft-RoCE: the interface that it runs on
        if not (path / "device").exists() and parent:
            hardware = sysfs / "class/net" / parent
        for port in _entries(path / "ports"):
            yield _device(sysfs, f"{path.name}:{port.name}", hardware, _rate(port / "rate"))


def _gpus(sysfs: Path) -> Iterator[Device]:
    """Yields GPUs in PCI order, which CUDA uses with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    for path in _entries(sysfs / "bus/pci/devices"):
        kind = read_text(path / "class") or ""
        if read_text(path / "vendor") == _NVIDIA and kind.startswith(_GPU_CLASSES):
            place = path.resolve()
            yield Device(path.name, _numa_node(sysfs, place), _pci_path(sysfs, place))


def _hardware_of(interface: Path) -> Path:
    """Returns the interface, or for a VLAN, bridge or bond the first hardware interface below it."""
    if not (interface / "device").exists():
        for lower in sorted(interface.glob("lower_*")):
            if (lower / "device").exists():
                return lower
    return interface


def _device(sysfs: Path, name: str, entry: Path, bandwidth: float | None) -> Device:
    """Describes a device. `entry` is its class folder, whose `device` link leads to the hardware."""
    if not (entry / "device").exists():
        return Device(name, bandwidth_bytes_s=bandwidth)
    place = (entry / "device").resolve()
    return Device(name, _numa_node(sysfs, place), _pci_path(sysfs, place), bandwidth)


def _numa_node(sysfs: Path, place: Path) -> int | None:
    """Returns the node of the nearest folder that has one. A virtio NIC's own folder has no `numa_node`; its PCI slot
    has."""
    root = sysfs.resolve()
    for folder in (place, *place.parents):
        if folder == root or root not in folder.parents:
            return None
        node = _number(folder / "numa_node")
        if node is not None:
            return int(node) if node >= 0 else None
    return None


def _pci_path(sysfs: Path, place: Path) -> tuple[str, ...]:
    parts = place.parts[len(sysfs.resolve().parts) :]
    return tuple(part for part in parts if _PCI.fullmatch(part))


def _rate(path: Path) -> float | None:
    """Returns bytes per second of an RDMA port, from text like "100 Gb/sec (4X EDR)"."""
    match = re.match(r"([0-9.]+) Gb/sec", read_text(path) or "")
    return float(match[1]) * 1e9 / _BITS_PER_BYTE if match else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(path: Path) -> float | None:
    try:
        return float(read_text(path) or "")
    except ValueError:
        return None


def read_text(path: Path) -> str | None:
    """Reads a stripped text file. Returns None if it is unreadable; the kernel answers EINVAL for unused entries."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


# linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_GET_ADDRESSES, _NEW_ADDRESS, _ERROR, _DONE = 22, 20, 2, 3
_REQUEST_ALL = 0x1 | 0x300
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_REPLY_BYTES = 64 << 10


class InterfaceAddress(NamedTuple):
    """One address of an interface of this machine."""

    interface: str
    address: IPv4Address | IPv6Address

    def covers(self, address: str) -> bool:
        """Returns True if the addresses are equal or both in IPv4 loopback, since all of 127.0.0.0/8 is this
        machine."""
        other = ip_address(address)
        is_loopback = other.is_loopback and self.address.is_loopback
        return other == self.address or (is_loopback and other.version == 4 == self.address.version)


def local_tcp_rails(hosts: Sequence[str]) -> list[Rail]:
    """Returns one TCP rail per host name or address of this machine, in the same order. Raises ConfigError."""
    return tcp_rails([_resolved(host) for host in hosts], read_addresses(), read_machine())


def tcp_rails(addresses: Sequence[str], own: Sequence[InterfaceAddress], machine: Machine) -> list[Rail]:
    """Pure part of `local_tcp_rails`. Each rail's endpoint is its address. Raises ConfigError."""
    rails: list[Rail] = []
    for address in addresses:
        if ip_address(address).is_unspecified:
            raise ConfigError(f"{address} cannot be dialled: give the address that peers can reach")
        interface = owner_of(address, own)
        if interface is None and own:
            raise ConfigError(
                f"{address} is not an address of this machine, so peers cannot reach it; "
                f"the machine has {', '.join(str(entry.address) for entry in own)}"
            )
        name = interface or address
        if any(rail.name == name for rail in rails):
            name = f"{name}/{address}"
        if any(rail.name == name for rail in rails):
            raise ConfigError(f"the address {address} is given twice")
        device = machine.devices.get(interface or "")
        numa_node, bandwidth = (device.numa_node, device.bandwidth_bytes_s) if device else (None, None)
        rails.append(Rail("tcp", name, address, numa_node, bandwidth))
    return rails


def owner_of(address: str, own: Sequence[InterfaceAddress]) -> str | None:
    """Returns the interface that has the address; None for an address of another machine."""
    return next((entry.interface for entry in own if entry.covers(address)), None)


def reachable_addresses(own: Sequence[InterfaceAddress]) -> list[str]:
    """Returns the addresses that other machines may reach: neither loopback nor link-local."""
    return [str(address) for _, address in own if not address.is_loopback and not address.is_link_local]


def read_addresses() -> list[InterfaceAddress]:
    """Returns the addresses of all interfaces in this network namespace; empty if the kernel does not report them."""
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(1.0)
            kernel.send(
                _HEADER.pack(_HEADER.size + _ADDRESS.size, _GET_ADDRESSES, _REQUEST_ALL, 1, 0)
                + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            )
            return list(_replies(kernel))
    except OSError:
        return []


def _replies(kernel: socket.socket) -> Iterator[InterfaceAddress]:
    while True:
        reply = memoryview(kernel.recv(_REPLY_BYTES))
        while len(reply) >= _HEADER.size:
            length, kind, *_ = _HEADER.unpack_from(reply)
            if kind in (_DONE, _ERROR):
                return
            if kind == _NEW_ADDRESS:
                yield from _parsed(reply[_HEADER.size : length])
            reply = reply[_aligned(length) :]


def _parsed(message: memoryview) -> Iterator[InterfaceAddress]:
    family, _, _, _, index = _ADDRESS.unpack_from(message)
    found: dict[int, bytes] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        found[kind] = bytes(rest[_ATTRIBUTE.size : length])
        rest = rest[_aligned(max(length, _ATTRIBUTE.size)) :]
    # On point-to-point links IFA_ADDRESS is the other end and IFA_LOCAL is this one.
    packed = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
    if packed and family in (socket.AF_INET, socket.AF_INET6):
        yield InterfaceAddress(socket.if_indextoname(index), ip_address(packed))


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _resolved(host: str) -> str:
    """Resolves a host name to a numeric address. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} is unknown: {error}") from error
    return str(found[0][4][0]).partition("%")[0]
