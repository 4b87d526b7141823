"""What a cluster needs around it, for `moonserve doctor`: ports to listen on, a disk, and the registry if it has one.

Its rule: what is tried is what the processes would do, on a port that is let go at once, a file that is removed, and a
registry that is only read.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.disk_speed import read_bytes_per_s
from deploy.doctor.findings import Finding, State
from deploy.terminal.amounts import rate, size
from protocol.errors import ConfigError, MoonserveError, Unauthenticated
from protocol.registry.connect import connect

SECTION = "surroundings"

DEFAULT_PORT = 8000  # of `moonserve serve`
ENOUGH_PORTS = 1024
"""That the kernel may choose: a listener per process and rail, and a connection per pair and stream."""
ENOUGH_FREE_BYTES = 1 << 30
ENOUGH_BYTES_S = 200e6
"""Below it a prefix of a small model is computed sooner than it is read (docs/store-performance.md)."""
_PROBE_BYTES = 32 << 20
_REGISTRY_S = 3.0
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_ports(host: str, port: int | None) -> Iterator[Finding]:
    """`port`: that somebody means to listen on; None = the default one, which may as well be another."""
    number = DEFAULT_PORT if port is None else port
    subject = f"port {number}"
    try:
        _listen(host, number)
    except OSError as error:
        text = f"cannot listen on {host}:{number}: {error.strerror or error}"
        remedy = "stop what uses it (ss -ltnp), or choose another with --port of moonserve serve"
        state = State.WARN if port is None else State.FAIL
        yield Finding(SECTION, subject, state, text, remedy)
    else:
        yield Finding(SECTION, subject, State.OK, f"free on {host}")
    if _RANGE.exists():
        yield chosen_ports(*map(int, _RANGE.read_text().split()))


def _listen(host: str, port: int) -> None:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


def chosen_ports(first: int, last: int) -> Finding:
    """Those that processes listen on where nobody names one; a firewall between machines has to let them through."""
    text, facts = f"{first} to {last}, chosen by the kernel", {"first": first, "last": last}
    if last - first + 1 >= ENOUGH_PORTS:
        return Finding(SECTION, "other ports", State.OK, text, facts=facts)
    remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
    return Finding(SECTION, "other ports", State.WARN, text, remedy, facts)


def check_disk(folder: Path | None, *, measure: bool) -> Finding:
    """`folder`: for `--ssd`; None = where logs and caches are, if nothing else is said."""
    where = folder or _existing(Path.home() / ".local" / "state" / "moonserve")
    try:
        free_bytes = shutil.disk_usage(where).free
        bytes_s = read_bytes_per_s(where, file_bytes=_PROBE_BYTES) if measure else None
    except OSError as error:
        return _no_disk(where, error.strerror or str(error), asked=folder is not None)
    except ConfigError as error:
        return _no_disk(where, error.message.rpartition(": ")[2], asked=folder is not None)
    return about_disk(where, free_bytes, bytes_s)


def _existing(path: Path) -> Path:
    """It, or the nearest folder above it."""
    return next(each for each in (path, *path.parents) if each.is_dir())


def _no_disk(folder: Path, why: str, *, asked: bool) -> Finding:
    remedy = "name a folder that this user may write to: --ssd FOLDER:SIZE, --log-dir FOLDER"
    state = State.FAIL if asked else State.WARN
    return Finding(SECTION, "disk", state, f"{folder}: {why}", remedy)


def about_disk(folder: Path, free_bytes: int, bytes_s: float | None) -> Finding:
    """`bytes_s`: how fast it reads, if that was measured."""
    text = f"{folder}: {size(free_bytes)} free"
    text += "" if bytes_s is None else f", reads {rate(bytes_s)}"
    facts = {"folder": str(folder), "free_bytes": free_bytes, "read_bytes_s": bytes_s}
    remedy = ""
    if free_bytes < ENOUGH_FREE_BYTES:
        remedy = "make room, or name another folder: --ssd FOLDER:SIZE, --log-dir FOLDER"
    elif bytes_s is not None and bytes_s < ENOUGH_BYTES_S:
        remedy = "too slow for --ssd: computing is as fast; give that a folder on an SSD"
    state = State.WARN if remedy else State.OK
    return Finding(SECTION, "disk", state, text, remedy, facts)


def check_registry(url: str | None, cluster_token: str) -> Finding:
    """Whether it answers. Blocks."""
    if url is None:
        text = "none given; one conductor and one gateway need none"
        return Finding(SECTION, "registry", State.OK, text)
    try:
        members = asyncio.run(_members(url, cluster_token))
    except TimeoutError:
        return _no_registry(f"no answer within {_REGISTRY_S:g} s", "is it up, and the way open?")
    except Unauthenticated as error:
        return _no_registry(error.message, "its password, or MOONSERVE_CLUSTER_TOKEN, is another")
    except MoonserveError as error:
        return _no_registry(error.message, "start it, or correct --registry")
    return Finding(SECTION, "registry", State.OK, f"answers; {len(members)} members")


async def _members(url: str, cluster_token: str) -> list[str]:
    registry = connect(url, cluster_token=cluster_token)
    try:
        async with asyncio.timeout(_REGISTRY_S):
            return [member.instance_id for member in await registry.members()]
    finally:
        await registry.close()


def _no_registry(text: str, remedy: str) -> Finding:
    return Finding(SECTION, "registry", State.FAIL, text, remedy)
