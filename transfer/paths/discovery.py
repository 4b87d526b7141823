"""Reads the machine: network addresses (rtnetlink, RFC 3549), and what sysfs tells of their interfaces.

A file of sysfs that is absent, unreadable or nonsense means "not known", never an error, since virtual
machines, containers and old kernels each leave out others. An address that is published must be one of
this machine's, since peers dial it. A TCP rail has the interface's name, and "eth0/10.0.0.2" for every
further address on the same interface. Opens no connection.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError
from transfer.address import Rail

SYSFS = Path("/sys")


def bandwidth_of(interface: str, sysfs: Path = SYSFS) -> float | None:
    """Bytes per second; −1 on virtual links, EINVAL where there is no carrier: then it is not known."""
    try:
        megabits = float(read_text(sysfs / "class/net" / interface / "speed") or "")
    except ValueError:
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def read_text(path: Path) -> str | None:
    """None where there is nothing; the kernel answers EINVAL for unused entries."""
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
    """One address of this machine."""

    interface: str
    address: IPv4Address | IPv6Address

    def covers(self, address: str) -> bool:
        """Equal, or within 127.0.0.0/8, all of which is this machine's."""
        asked = ip_address(address)
        is_loopback = asked.is_loopback and self.address.is_loopback
        return asked == self.address or (is_loopback and asked.version == 4 == self.address.version)


def local_tcp_rails(hosts: Sequence[str]) -> list[Rail]:
    """One rail per host name or address of this machine, in that order. Raises ConfigError."""
    return tcp_rails([_resolved(host) for host in hosts], read_addresses())


def tcp_rails(
    addresses: Sequence[str], own: Sequence[InterfaceAddress], sysfs: Path = SYSFS
) -> list[Rail]:
    """Each rail's endpoint is its address. `own`: of this machine. Raises ConfigError."""
    rails: list[Rail] = []
    for address in addresses:
        if ip_address(address).is_unspecified:
            raise ConfigError(f"{address} cannot be dialled: give the address that peers can reach")
        interface = owner_of(address, own)
        if interface is None and own:
            raise ConfigError(
                f"{address} is no address of this machine, so peers could not reach it; "
                f"it has {', '.join(str(entry.address) for entry in own)}"
            )
        name = interface or address
        if any(rail.name == name for rail in rails):
            name = f"{name}/{address}"
        if any(rail.name == name for rail in rails):
            raise ConfigError(f"the address {address} is given twice")
        rails.append(Rail("tcp", name, address, bandwidth_of(interface or name, sysfs)))
    return rails


def owner_of(address: str, own: Sequence[InterfaceAddress]) -> str | None:
    """The interface; None for an address of another machine."""
    return next((entry.interface for entry in own if entry.covers(address)), None)


def reachable_addresses(own: Sequence[InterfaceAddress]) -> list[str]:
    """Those that other machines may reach: neither loopback nor link-local."""
    return [
        str(address) for _, address in own if not address.is_loopback and not address.is_link_local
    ]


def read_addresses() -> list[InterfaceAddress]:
    """Of all interfaces in this network namespace; empty where the kernel does not tell."""
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
    # On point-to-point links IFA_ADDRESS is the other end and IFA_LOCAL this one.
    packed = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
    if packed and family in (socket.AF_INET, socket.AF_INET6):
        yield InterfaceAddress(socket.if_indextoname(index), ip_address(packed))


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _resolved(host: str) -> str:
    """A numeric address. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {host!r} is unknown: {error}") from error
    return str(found[0][4][0]).partition("%")[0]
