"""Facts about the local machine: host identity, processor, memory and cache folder."""

import functools
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_COUNTED = ("MemAvailable:", "SwapFree:")


@functools.cache
def boot_id() -> str:
    """Returns the id of this boot of the kernel, equal for all processes under one kernel, in any container.

    Raises OSError if there is no /proc.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def host_identity() -> str:
    """Returns an identity that is equal for processes that can share memory: boot id and network namespace.

    The namespace is part of it because memory is shared over abstract Unix sockets, which are private to a namespace.
    Without /proc it is the host name.
    """
    try:
        namespace = os.readlink("/proc/self/ns/net")
        return f"{boot_id()[:13]}.{namespace.strip('net:[]')}"
    except OSError:
        return socket.gethostname()


def processor() -> str:
    """Returns the processor's model and features, as precisely as the platform reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "|".join(sorted(names)) or platform.machine()


def cache_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Returns the folder of compiled kernels and timing profiles (XDG base directory specification)."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home / ".cache") / "moonserve"


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup_limit: Path = _CGROUP_LIMIT) -> int | None:
    """Returns the bytes a process can still allocate by the kernel and the control group's limit; None if unknown."""
    lines = [line.split() for line in _text(meminfo).splitlines()]
    kib = [int(line[1]) for line in lines if line[:1] and line[0] in _COUNTED]
    limit = _text(cgroup_limit).strip()
    limits = [sum(kib) << 10] if kib else []
    return min([*limits, *([int(limit)] if limit.isdigit() else [])], default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
