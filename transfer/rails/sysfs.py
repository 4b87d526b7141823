"""Reads what `topology` decides from: sysfs, and the operator's file.

Owns the names of sysfs' files. Its rule: one that is absent, unreadable or nonsense means "not known",
never an error, since virtual machines, containers and old kernels each leave out others. Decides
nothing, and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.errors import ConfigError
from transfer.address import Rail
from transfer.rails.topology import Device, Machine, Topology, decide, parse

SYSFS = Path("/sys")

_BITS_PER_BYTE = 8
_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
"""VGA controller and 3D controller (PCI code and ID assignment)."""


def read_topology(
    rails: Sequence[Rail], override: Path | None = None, sysfs: Path = SYSFS
) -> Topology:
    """The matrix of an engine's local rails. Raises ConfigError for an override that is wrong."""
    found = decide(read_machine(sysfs), rails)
    if override is None:
        return found
    try:
        replacement = parse(override.read_text(), list(dict.fromkeys(rail.name for rail in rails)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the topology file {override}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"topology file {override}: {error.message}") from error
    return found.replaced_by(replacement)


def read_machine(sysfs: Path = SYSFS) -> Machine:
    """NUMA nodes, network interfaces, RDMA ports and GPUs of this machine."""
    devices = [*_interfaces(sysfs), *_rdma_ports(sysfs)]
    return Machine(
        numa_distances=_numa_distances(sysfs),
        devices={device.name: device for device in devices},
        gpus=tuple(_gpus(sysfs)),
    )


def _numa_distances(sysfs: Path) -> dict[int, dict[int, int]]:
    nodes = sorted(
        int(path.name.removeprefix("node"))
        for path in (sysfs / "devices/system/node").glob("node[0-9]*")
    )
    distances: dict[int, dict[int, int]] = {}
    for node in nodes:
        text = _text(sysfs / f"devices/system/node/node{node}/distance") or ""
        values = [int(word) for word in text.split() if word.isdigit()]
        if len(values) != len(nodes):  # 10 and 20 are what ACPI prescribes when nothing is measured
            values = [10 if other == node else 20 for other in nodes]
        distances[node] = dict(zip(nodes, values, strict=True))
    return distances or {0: {0: 10}}


def _interfaces(sysfs: Path) -> Iterator[Device]:
    for path in _entries(sysfs / "class/net"):
        megabits = _number(path / "speed")  # −1 on virtual links, EINVAL when there is no carrier
        bandwidth = megabits * 1e6 / _BITS_PER_BYTE if megabits and megabits > 0 else None
        yield _device(sysfs, path.name, _hardware_of(path), bandwidth)


def _rdma_ports(sysfs: Path) -> Iterator[Device]:
    for path in _entries(sysfs / "class/infiniband"):
        hardware = path
        parent = _text(path / "parent")  # Soft-RoCE names the interface that it runs on
        if not (path / "device").exists() and parent:
            hardware = sysfs / "class/net" / parent
        for port in _entries(path / "ports"):
            yield _device(sysfs, f"{path.name}:{port.name}", hardware, _rate(port / "rate"))


def _gpus(sysfs: Path) -> Iterator[Device]:
    """In PCI order, which CUDA follows with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    for path in _entries(sysfs / "bus/pci/devices"):
        kind = _text(path / "class") or ""
        if _text(path / "vendor") == _NVIDIA and kind.startswith(_GPU_CLASSES):
            place = path.resolve()
            yield Device(path.name, _numa_node(sysfs, place), _pci_path(sysfs, place))


def _hardware_of(interface: Path) -> Path:
    """Itself, or for a VLAN, bridge or bond the first interface below it that is hardware."""
    if not (interface / "device").exists():
        for lower in sorted(interface.glob("lower_*")):
            if (lower / "device").exists():
                return lower
    return interface


def _device(sysfs: Path, name: str, entry: Path, bandwidth: float | None) -> Device:
    """`entry` is the class folder, whose `device` link leads to the hardware."""
    if not (entry / "device").exists():
        return Device(name, bandwidth_bytes_s=bandwidth)
    place = (entry / "device").resolve()
    return Device(name, _numa_node(sysfs, place), _pci_path(sysfs, place), bandwidth)


def _numa_node(sysfs: Path, place: Path) -> int | None:
    """The nearest ancestor that knows: a virtio NIC's own folder has no `numa_node`, its PCI slot's has."""
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
    """Of an RDMA port: "100 Gb/sec (4X EDR)"."""
    match = re.match(r"([0-9.]+) Gb/sec", _text(path) or "")
    return float(match[1]) * 1e9 / _BITS_PER_BYTE if match else None


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
