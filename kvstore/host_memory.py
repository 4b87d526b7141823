"""How much memory a process of this machine can still have: what the kernel and its control group leave it.

All of a node's memory is touched at its start, so more than there is would not be refused but end processes.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_COUNTED = ("MemAvailable:", "SwapFree:")


def available_bytes(meminfo: Path = MEMINFO, cgroup_limit: Path = CGROUP_LIMIT) -> int | None:
    """None where the kernel does not say."""
    lines = [line.split() for line in _text(meminfo).splitlines()]
    kib = [int(line[1]) for line in lines if line[:1] and line[0] in _COUNTED]
    limit = _text(cgroup_limit).strip()
    told = [sum(kib) << 10] if kib else []
    return min([*told, *([int(limit)] if limit.isdigit() else [])], default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
