"""Checks of a cluster's surroundings for `moonserve doctor`: ports to listen on, a disk, and the registry if any.

Rule: a check does what the processes would do, then releases the port or removes the file. A registry is only read.
"""

import asyncio
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from moonserve.deploy.diagnostics.doctor_findings import Finding
from moonserve.deploy.terminal import rate, size
from moonserve.kvstore.disk.io.segment_file import open_file
from moonserve.protocol.errors import ConfigError, MoonserveError, Unauthenticated
from moonserve.protocol.membership.registry.client import connect_registry

SECTION = "surroundings"

DEFAULT_PORT = 8000  # of `moonserve serve`
ENOUGH_PORTS = 1024
"""Ports that the kernel may choose: for a listener per process and rail, and a connection per pair and stream."""
ENOUGH_FREE_BYTES = 1 << 30
ENOUGH_BYTES_S = 200e6
"""Below this rate, computing a prefix of a small model is faster than reading it (docs/store-performance.md)."""
_PROBE_BYTES = 32 << 20
_REGISTRY_S = 3.0
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_ports(host: str, port: int | None) -> Iterator[Finding]:
    """Yields the findings for ports. `port`: must be free; None = the default port, which causes only a warning."""
    number = DEFAULT_PORT if port is None else port
    text, remedy = f"free on {host}", ""
    try:
        _listen(host, number)
    except OSError as error:
        text = f"cannot listen on {host}:{number}: {error.strerror or error}"
        remedy = "stop what uses it (ss -ltnp), or choose another with --port of moonserve serve"
    fails = bool(remedy) and port is not None
    yield Finding(SECTION, f"port {number}", text, remedy, fails=fails)
    if _RANGE.exists():
        yield ephemeral_ports_finding(*map(int, _RANGE.read_text().split()))


def _listen(host: str, port: int) -> None:
    """Listens for a moment. Raises OSError if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)


def ephemeral_ports_finding(first: int, last: int) -> Finding:
    """Returns the finding for the kernel's port range, which firewalls between machines must pass. Processes without a
    given port listen there."""
    text = f"{first} to {last}, chosen by the kernel"
    remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
    is_short = last - first + 1 < ENOUGH_PORTS
    return Finding(SECTION, "other ports", text, remedy if is_short else "")


def check_disk(folder: Path | None, *, measure: bool) -> Finding:
    """Returns the finding for a disk. `folder`: folder for `--ssd`; None = the default folder of logs and caches."""
    state = Path.home() / ".local" / "state" / "moonserve"
    where = folder or next(each for each in (state, *state.parents) if each.is_dir())
    try:
        free_bytes = shutil.disk_usage(where).free
        bytes_s = read_bytes_per_s(where, file_bytes=_PROBE_BYTES) if measure else None
    except OSError as error:
        why = error.strerror or str(error)
    except ConfigError as error:
        why = error.message.rpartition(": ")[2]
    else:
        return disk_finding(where, free_bytes, bytes_s)
    remedy = "name a folder that this user may write to: --ssd FOLDER:SIZE, --log-dir FOLDER"
    return Finding(SECTION, "disk", f"{where}: {why}", remedy, fails=folder is not None)


def disk_finding(folder: Path, free_bytes: int, bytes_s: float | None) -> Finding:
    """Returns the finding for a writable folder. `bytes_s`: measured read rate; None = not measured."""
    text = f"{folder}: {size(free_bytes)} free"
    text += "" if bytes_s is None else f", reads {rate(bytes_s)}"
    remedy = ""
    if free_bytes < ENOUGH_FREE_BYTES:
        remedy = "make room, or name another folder: --ssd FOLDER:SIZE, --log-dir FOLDER"
    elif bytes_s is not None and bytes_s < ENOUGH_BYTES_S:
        remedy = "too slow for --ssd: computing is as fast; give that a folder on an SSD"
    return Finding(SECTION, "disk", text, remedy)


def check_registry(url: str | None, cluster_token: str) -> Finding:
    """Returns the finding for the registry: if it answers, and its number of members. Blocks."""
    if url is None:
        text = "none given; one conductor and one gateway need none"
        return Finding(SECTION, "registry", text)
    try:
        members = asyncio.run(_members(url, cluster_token))
    except TimeoutError:
        text, remedy = f"no answer within {_REGISTRY_S:g} s", "check that it runs and that no firewall blocks it"
    except Unauthenticated as error:
        text, remedy = error.message, "check its password, or MOONSERVE_CLUSTER_TOKEN"
    except MoonserveError as error:
        text, remedy = error.message, "start it, or correct --registry"
    else:
        return Finding(SECTION, "registry", f"answers; {len(members)} members")
    return Finding(SECTION, "registry", text, remedy, fails=True)


async def _members(url: str, cluster_token: str) -> list[str]:
    registry = connect_registry(url, cluster_token=cluster_token)
    try:
        async with asyncio.timeout(_REGISTRY_S):
            return [member.instance_id for member in await registry.members()]
    finally:
        await registry.close()


FILE_BYTES = 128 << 20
_READ_BYTES = 1 << 20  # size of the SSD tier's reads of adjacent blocks
_NUM_THREADS = 4  # a disk reaches its rate only with several reads in flight
_PASSES = 3


def read_bytes_per_s(folder: Path, *, file_bytes: int = FILE_BYTES) -> float:
    """Returns the median read rate of several passes over a file. Raises ConfigError if the folder is not writable."""
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="moonserve-profile-") as scratch:
            path = Path(scratch) / "file"
            _write(path, file_bytes)
            return file_bytes / median(_read(path, file_bytes) for _ in range(_PASSES))
    except OSError as error:
        raise ConfigError(f"--disk {folder}: {error.strerror}") from error


def _write(path: Path, nbytes: int) -> None:
    """Writes random bytes, because some disks do not store zeros."""
    fd, _ = open_file(path, create=True, direct=False)
    try:
        for offset in range(0, nbytes, _READ_BYTES):
            os.pwrite(fd, os.urandom(_READ_BYTES), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path, nbytes: int) -> float:
    """Returns the seconds to read the file."""
    fd, direct = open_file(path, create=False, direct=True)
    try:
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        pieces = range(0, nbytes, _READ_BYTES)
        began = time.perf_counter()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            shares = [pieces[first::_NUM_THREADS] for first in range(_NUM_THREADS)]
            list(threads.map(lambda share: _read_share(fd, share), shares))
        return time.perf_counter() - began
    finally:
        os.close(fd)


def _read_share(fd: int, offsets: Sequence[int]) -> None:
    memory = mmap.mmap(-1, _READ_BYTES)  # page-aligned, as O_DIRECT requires
    with memory:
        for offset in offsets:
            os.preadv(fd, [memory], offset)
