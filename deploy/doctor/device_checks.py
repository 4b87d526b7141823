"""GPUs and RDMA ports for `moonserve doctor`: lists them and checks if KV can be computed on and moved over them.

If the drivers show no GPU, torch is not imported, which would take seconds.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from deploy.doctor.findings import Finding
from deploy.terminal.output import size
from engine.device import Gpu, count_gpus, usable_gpus
from protocol.errors import ConfigError
from transfer.rdma.device import Port, discover

_ROUTES = Path("/proc/net/route")
_UP = 0x1  # RTF_UP, linux/route.h


def check_gpus() -> list[Finding]:
    """Returns one finding per GPU, or a single one if there is no usable GPU."""
    num_shown = count_gpus()
    if num_shown == 0:
        return [Finding("gpu", "devices", "none; workers compute on the processor")]
    try:
        return [_usable(number, gpu) for number, gpu in enumerate(usable_gpus())]
    except ConfigError as error:
        why = error.message
    except ImportError as error:
        why = f"torch cannot be imported ({error}): pip install torch"
    text = f"{num_shown} shown by the driver, none used: workers compute on the processor"
    return [Finding("gpu", "devices", text, why)]


def _usable(number: int, gpu: Gpu) -> Finding:
    text = f"{gpu.name}, {size(gpu.total_bytes)}, {size(gpu.free_bytes)} free"
    remedy = "end what uses it (nvidia-smi), or give workers less: --gpu-memory-utilization"
    is_taken = 2 * gpu.free_bytes < gpu.total_bytes
    return Finding("gpu", f"cuda:{number}", text, remedy if is_taken else "")


def check_rdma() -> Iterator[Finding]:
    """Yields one finding per RDMA port, or a single one if there is no port."""
    ports = discover()
    if not ports:
        yield Finding("rdma", "devices", "none; KV between machines goes over tcp")
        return
    table = _ROUTES.read_text() if _ROUTES.exists() else ""
    for port in ports:
        yield about_port(port, table)


def about_port(port: Port, table: str) -> Finding:
    """Returns the finding for an RDMA port. `table`: contents of /proc/net/route."""
    found = routes_of(port, table)
    where = f"; routes to {', '.join(found)}" if found else ""
    return Finding("rdma", port.name, f"{port}{where}", _remedy(port, found))


def routes_of(port: Port, table: str) -> list[str]:
    """Returns the networks that are routed through the interface of the port's GID; 0.0.0.0/0 is the default route."""
    interface = port.gid.netdev if port.gid else None
    rows = (line.split() for line in table.splitlines()[1:])
    return [
        str(IPv4Network((_address(row[1]), _address(row[7]))))
        for row in rows
        if len(row) > 7 and row[0] == interface and int(row[3], 16) & _UP
    ]


def _address(digits: str) -> str:
    """Converts the kernel's hexadecimal form, in which an address is a number in the machine's byte order."""
    return socket.inet_ntoa(struct.pack("=I", int(digits, 16)))


def _remedy(port: Port, routes: Sequence[str]) -> str:
    """Returns "" for a usable port. Routes of InfiniBand are not checked: its subnet manager sets them."""
    if port.state != "ACTIVE":
        return "rdma link show; the cable, or ip link set INTERFACE up"
    if port.gid is None:
        return "give its interface an address that peers can route to: ip address add"
    if port.is_ethernet and port.gid.address.ipv4_mapped is not None and not routes:
        name = port.gid.netdev
        return f"no route leads through {name}: ip route add NETWORK dev {name}"
    return ""
