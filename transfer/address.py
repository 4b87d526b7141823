"""What an engine publishes so that peers can reach it; opaque to everyone but this package.

`ms1;id=<instance>;host=<boot id>;shm=<abstract socket>;tcp=<host>:<port>`: printable, versioned, and
bound to one incarnation of one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import Incompatible, InvalidRequest

_VERSION = "ms1"


@dataclass(frozen=True, slots=True)
class Address:
    """`instance` is random per process; `endpoints` maps a transport's name to what it dials."""

    instance: bytes
    host: str
    endpoints: Mapping[str, str]

    def __str__(self) -> str:
        pairs = {"id": self.instance.hex(), "host": self.host, **self.endpoints}
        return ";".join([_VERSION, *(f"{name}={value}" for name, value in pairs.items())])


def parse(text: str) -> Address:
    """Raises Incompatible for another version and InvalidRequest for anything unreadable."""
    version, *parts = text.split(";")
    if version != _VERSION:
        known = version.startswith("ms") and version[2:].isdigit()
        kind = Incompatible if known else InvalidRequest
        raise kind(f"transfer address of version {version[:16]!r}, this is {_VERSION}")
    pairs = dict(part.partition("=")[::2] for part in parts)
    try:
        instance, host = bytes.fromhex(pairs.pop("id")), pairs.pop("host")
    except (KeyError, ValueError) as error:
        raise InvalidRequest(f"malformed transfer address {text[:200]!r}") from error
    return Address(instance=instance, host=host, endpoints=pairs)


def host_identity() -> str:
    """Equal on, and only on, processes under one kernel; whether they can meet shows on connecting."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
