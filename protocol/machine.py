"""This machine: its identity, the name of its processor, and where caches go."""

from __future__ import annotations

import functools
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Identity of this boot of the kernel: equal for all processes under one kernel, in whatever containers they run.

    Raises OSError where there is no /proc.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def host_identity() -> str:
    """Equal for processes that can share memory: the boot of this kernel and the network namespace.

    Abstract Unix sockets, over which memory is shared, are private to a network namespace.
    """
    try:
        namespace = os.readlink("/proc/self/ns/net")
        return f"{boot_id()[:13]}.{namespace.strip('net:[]')}"
    except OSError:
        return socket.gethostname()


def processor() -> str:
    """The processor's model, as precisely as the platform tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "|".join(sorted(names)) or platform.machine()


def cache_folder(environ: Mapping[str, str], home: Path) -> Path:
    """Where compiled kernels and timing profiles are kept, by the XDG base directory specification."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else home / ".cache") / "moonserve"
