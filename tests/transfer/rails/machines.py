"""Fake sysfs trees, with links where the kernel has links."""

from __future__ import annotations

import os
from pathlib import Path


class FakeMachine:
    """A machine below `root`, which takes the place of /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def numa_node(self, node: int, distances: str = "") -> None:
        self._write(f"devices/system/node/node{node}/meminfo", "")
        if distances:
            self._write(f"devices/system/node/node{node}/distance", distances)

    def pci(self, *slots: str, numa_node: int | None = None, **files: str) -> str:
        """A device below the bridges named before it; returns its place."""
        place = "/".join(["devices", *slots])
        self._folder(place)
        if numa_node is not None:
            self._write(f"{place}/numa_node", str(numa_node))
        for name, content in files.items():
            self._write(f"{place}/{name}", content)
        self._link(f"bus/pci/devices/{slots[-1]}", place)
        return place

    def interface(self, name: str, place: str | None, speed: str | None = None) -> None:
        """`place`: of its hardware; None: a virtual one."""
        entry = f"{place or 'devices/virtual'}/net/{name}"
        self._folder(entry)
        if place is not None:
            self._link(f"{entry}/device", place)
        if speed is not None:
            self._write(f"{entry}/speed", speed)
        self._link(f"class/net/{name}", entry)

    def stacked(self, name: str, *lower: str, speed: str | None = None) -> None:
        """A bond, bridge or VLAN over other interfaces."""
        self.interface(name, None, speed)
        for below in lower:
            self._link(f"devices/virtual/net/{name}/lower_{below}", f"class/net/{below}")

    def rdma(self, name: str, place: str, *rates: str) -> None:
        entry = f"{place}/infiniband/{name}"
        self._ports(entry, rates)
        self._link(f"{entry}/device", place)
        self._link(f"class/infiniband/{name}", entry)

    def soft_roce(self, name: str, interface: str) -> None:
        entry = f"devices/virtual/infiniband/{name}"
        self._ports(entry, ("2.5 Gb/sec (1X SDR)",))
        self._write(f"{entry}/parent", interface)
        self._link(f"class/infiniband/{name}", entry)

    def _ports(self, entry: str, rates: tuple[str, ...]) -> None:
        for number, rate in enumerate(rates, 1):
            self._write(f"{entry}/ports/{number}/rate", rate)

    def _folder(self, path: str) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _write(self, path: str, content: str) -> None:
        self._folder(str(Path(path).parent))
        (self.root / path).write_text(content + "\n")

    def _link(self, path: str, target: str) -> None:
        parent = self._folder(str(Path(path).parent))
        (self.root / path).symlink_to(os.path.relpath(self.root / target, parent))


def two_sockets(root: Path) -> FakeMachine:
    """Two NUMA nodes; on each a switch with a GPU and an RDMA NIC; Ethernet on node 0."""
    machine = FakeMachine(root)
    for node, distances in enumerate(("10 21", "21 10")):
        machine.numa_node(node, distances)
        complex_, bridge = f"pci000{node}:00", f"000{node}:00:01.0"
        gpu = {"vendor": "0x10de", "class": "0x030200"}
        machine.pci(complex_, bridge, f"000{node}:02:00.0", numa_node=node, **gpu)
        nic = machine.pci(complex_, bridge, f"000{node}:03:00.0", numa_node=node)
        machine.rdma(f"mlx5_{node}", nic, "400 Gb/sec (4X NDR)")
    ethernet = machine.pci("pci0000:00", "0000:00:07.0", numa_node=0)
    machine.interface("eth0", ethernet, speed="25000")
    machine.interface("lo", None)
    return machine
