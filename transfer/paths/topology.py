"""Decides which rails are near which memory: the topology matrix.

Owns the matrix (memory location → preferred and secondary rails) and its rule. Nearer means more common PCIe bridges
(GPUs only), then a shorter NUMA distance. Missing information counts as near, so that an unknown rail is not avoided.
Pure; `hardware_discovery` reads the machine. Knows no peers and no speeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from moonserve.transfer.paths.peer_address import Rail

Distance = tuple[int, int]
"""Distance; smaller is nearer: minus the number of common PCIe bridges, then the NUMA distance."""


@dataclass(frozen=True, slots=True)
class Device:
    """A NIC, RDMA port or GPU and its place in the machine."""

    name: str
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """PCI addresses from the root complex down to the device; empty for virtual devices."""
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about the machine that decide nearness."""

    numa_distances: Mapping[int, Mapping[int, int]] = field(default_factory=lambda: {0: {0: 10}})
    """NUMA distances as the firmware reports them: 10 to itself, about 20 to the other socket."""
    devices: Mapping[str, Device] = field(default_factory=dict)
    """Interfaces ("eth0") and RDMA ports ("mlx5_0:1") by name."""
    gpus: tuple[Device, ...] = ()
    """GPUs by index: GPU i is memory location "cuda:i". In PCI address order unless specified otherwise."""


@dataclass(frozen=True, slots=True)
class Preference:
    """Rail names by preference for one memory location. No name is in both."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """Matrix of one engine's local rails. An empty matrix prefers every rail."""

    matrix: Mapping[str, Preference] = field(default_factory=dict)

    def prefers(self, location: str, rail: Rail) -> bool:
        """Returns False only if the matrix lists the rail as secondary for this memory."""
        preference = self.matrix.get(location)
        return preference is None or rail.name not in preference.secondary


def decide_topology(machine: Machine, rails: Sequence[Rail]) -> Topology:
    """Returns the matrix of `rails` for every NUMA node and GPU of the machine."""
    names = list(dict.fromkeys(rail.name for rail in rails))
    devices = [_device_of(machine, name, rails) for name in names]
    matrix: dict[str, Preference] = {}
    for node in sorted(machine.numa_distances):
        matrix[f"cpu:{node}"] = _split({device.name: _numa_distance(machine, node, device) for device in devices})
    for index, gpu in enumerate(machine.gpus):
        matrix[f"cuda:{index}"] = _split({device.name: _gpu_distance(machine, gpu, device) for device in devices})
    return Topology(matrix)


def _device_of(machine: Machine, name: str, rails: Sequence[Rail]) -> Device:
    """Finds a rail's device; further rails of an interface are named "eth0/10.0.0.2" (`tcp_rails`)."""
    device = machine.devices.get(name.partition("/")[0])
    if device is not None:
        return Device(name, device.numa_node, device.pci_path)
    return Device(name, next(rail.numa_node for rail in rails if rail.name == name))


def _split(distances: Mapping[str, Distance | None]) -> Preference:
    """Splits rails into preferred ones, which are the nearest and the unknown, and the others."""
    known = {name: distance for name, distance in distances.items() if distance is not None}
    least = min(known.values(), default=None)
    farther = sorted((name for name in known if known[name] != least), key=known.__getitem__)
    return Preference(tuple(name for name in distances if name not in farther), tuple(farther))


def _numa_distance(machine: Machine, node: int, device: Device) -> Distance | None:
    distance = _between(machine, node, device.numa_node)
    return None if distance is None else (0, distance)


def _between(machine: Machine, node: int | None, other: int | None) -> int | None:
    return None if node is None or other is None else machine.numa_distances.get(node, {}).get(other)


def _gpu_distance(machine: Machine, gpu: Device, device: Device) -> Distance | None:
    """Ranks a common PCIe switch nearer than a common root complex, and that nearer than the same socket only."""
    common = _num_common(gpu.pci_path, device.pci_path)
    distance = _between(machine, gpu.numa_node, device.numa_node)
    if not common and distance is None:
        return None
    return (-common, distance or 0)


def _num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Counts the bridges above both devices, root complex included."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
