"""RDMA device ports for `moonserve doctor`: their state, the GID that would be used, and where its interface routes to.

Knows sysfs and the kernel's table of routes (proc(5), /proc/net/route), no verbs: whether bytes arrive is
`transfer_checks`'s.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from deploy.doctor.findings import Finding, State
from transfer.rdma.device import Port, discover

SECTION = "rdma"

_ROUTES = Path("/proc/net/route")
_UP = 0x1  # RTF_UP, linux/route.h


def check_rdma() -> Iterator[Finding]:
    """A line for each port; one where there is none."""
    ports = discover()
    if not ports:
        yield Finding(SECTION, "devices", State.OK, "none; KV between machines goes over tcp")
        return
    table = _ROUTES.read_text() if _ROUTES.exists() else ""
    for port in ports:
        yield about_port(port, table)


def about_port(port: Port, table: str) -> Finding:
    """`table`: as /proc/net/route has it."""
    facts = {**_facts(port), "routes": (found := routes_of(port, table))}
    where = f"; routes to {', '.join(found)}" if found else ""
    remedy = _remedy(port, found)
    state = State.WARN if remedy else State.OK
    return Finding(SECTION, port.name, state, f"{port}{where}", remedy, facts)


def routes_of(port: Port, table: str) -> list[str]:
    """Networks that are reached through the interface behind its GID, the default one as 0.0.0.0/0."""
    interface = port.gid.netdev if port.gid else None
    rows = (line.split() for line in table.splitlines()[1:])
    return [
        str(IPv4Network((_address(row[1]), _address(row[7]))))
        for row in rows
        if len(row) > 7 and row[0] == interface and int(row[3], 16) & _UP
    ]


def _address(digits: str) -> str:
    """The kernel prints the number as it lies in memory."""
    return socket.inet_ntoa(struct.pack("=I", int(digits, 16)))


def _remedy(port: Port, routes: Sequence[str]) -> str:
    """Empty where it can be used; InfiniBand's routes are its subnet manager's."""
    if port.state != "ACTIVE":
        return "rdma link show; the cable, or ip link set INTERFACE up"
    if port.gid is None:
        return "give its interface an address that peers can route to: ip address add"
    has_ipv4 = port.gid.address.ipv4_mapped is not None
    if port.is_ethernet and has_ipv4 and not routes:
        return (
            f"no route leads through {port.gid.netdev}: ip route add NETWORK dev {port.gid.netdev}"
        )
    return ""


def _facts(port: Port) -> dict[str, object]:
    gid = port.gid
    return {
        "state": port.state,
        "link": "Ethernet" if port.is_ethernet else "InfiniBand",
        "bandwidth_bytes_s": port.bandwidth_bytes_s,
        "numa_node": port.numa_node,
        "gid_index": gid.index if gid else None,
        "gid_kind": gid.kind if gid else None,
        "gid_address": str(gid.address) if gid else None,
        "interface": gid.netdev if gid else None,
    }
