"""The address that an engine publishes for its peers; opaque outside this package.

Example: `ms2;id=<instance>;host=<boot id>;name=decode-0;shm=shm@<socket>;tcp=eth0@10.0.0.1:4000#0,eth1@10.0.1.1:4000`
It is printable, versioned and bound to one incarnation of one process. Each transport lists its rails as name@endpoint,
with #<NUMA node> if known. `tls=1` means that the tcp transport is encrypted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonserve.protocol.errors import Incompatible, InvalidRequest

_VERSION = "ms2"
_RAIL = re.compile(r"(?P<name>[^,;@#]+)@(?P<endpoint>[^,;@#]+)(#(?P<numa>\d{1,4}))?")
_MAX_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class Rail:
    """One network attachment of a host: a NIC's address, an RDMA port or the host's memory.

    Local rails are discovered. Remote ones come with the peer's address.
    """

    transport: str
    name: str
    """Name, unique within its transport and host: "eth0", "mlx5_0:1", "shm"."""
    endpoint: str
    """Endpoint that peers dial; opaque outside the transport. Contains no ',', ';', '@' or '#'."""
    numa_node: int | None = None
    bandwidth_bytes_s: float | None = None
    """Nominal bandwidth; None if the system does not report it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Parsed address of an engine. `instance` is random per process; `rails` lists the rails of each transport."""

    instance: bytes
    host: str
    """The kernel's boot id. Only a connection attempt shows whether two processes on one kernel can reach each
    other."""
    rails: Mapping[str, Sequence[Rail]]
    name: str = ""
    """Name for logs and metrics; need not be unique."""
    tls: bool = False
    """True if the tcp transport is encrypted."""

    def __str__(self) -> str:
        pairs = {"id": self.instance.hex(), "host": self.host}
        if self.name:
            pairs["name"] = self.name
        if self.tls:
            pairs["tls"] = "1"
        for transport, rails in self.rails.items():
            pairs[transport] = ",".join(_rail_text(rail) for rail in rails)
        return ";".join([_VERSION, *(f"{name}={value}" for name, value in pairs.items())])


def parse_address(text: str) -> Address:
    """Parses a published address. Raises Incompatible for another version and InvalidRequest for unreadable text."""
    version, *parts = text[:_MAX_CHARS].split(";")
    if version != _VERSION:
        known = version.startswith("ms") and version[2:].isdigit()
        kind = Incompatible if known else InvalidRequest
        raise kind(f"transfer address of version {version[:16]!r}, this is {_VERSION}")
    pairs = dict(part.partition("=")[::2] for part in parts)
    try:
        instance, host = bytes.fromhex(pairs.pop("id")), pairs.pop("host")
        name, tls = pairs.pop("name", ""), pairs.pop("tls", "") == "1"
        rails = {key: _parse_rails(key, value) for key, value in pairs.items()}
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"malformed transfer address {text[:200]!r}") from error
    return Address(instance, host, rails, name, tls)


def _rail_text(rail: Rail) -> str:
    numa = "" if rail.numa_node is None else f"#{rail.numa_node}"
    return f"{rail.name}@{rail.endpoint}{numa}"


def _parse_rails(transport: str, text: str) -> tuple[Rail, ...]:
    matches = [_RAIL.fullmatch(part) for part in text.split(",")]
    if None in matches:
        raise ValueError(f"malformed rails {text[:200]!r}")
    return tuple(
        Rail(transport, match["name"], match["endpoint"], int(match["numa"]) if match["numa"] else None)
        for match in matches
        if match is not None
    )
