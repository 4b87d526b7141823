"""What `moonserve doctor` looks at before any transfer: software, cores, memory, limits.

Owns what is enough. Its rule: only a package that is missing, or an old Python, keeps a cluster from starting; whatever
else is short is a warning.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.findings import Finding, State
from deploy.terminal.amounts import size
from transfer.native import data_plane

PACKAGES = ("moonserve", "torch", "transformers", "numpy", "grpcio", "xxhash")

VECTORS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")

LEAST_PYTHON = (3, 11)  # pyproject.toml

ENOUGH_FILES = 4096
"""Per process: a connection per peer and stream, a descriptor per segment of a peer."""
ENOUGH_AVAILABLE_BYTES = 2 << 30
"""The demo cluster with its default pools needs about this."""

_CGROUP = Path("/sys/fs/cgroup")


def check_software() -> Iterator[Finding]:
    yield _python(platform.python_version_tuple())
    for name in PACKAGES:
        yield _package(name)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    plane = data_plane().name
    if plane == "native":
        text = f"{compiler or 'none, but compiled code is cached'}; data plane compiled"
        yield Finding("software", "C compiler", State.OK, text, facts={"data_plane": plane})
    else:
        yield Finding(
            "software",
            "C compiler",
            State.WARN,
            f"{compiler or 'none'}; data plane in Python, attention in torch: slower",
            "install one (Debian: apt-get install gcc libc6-dev) and start again",
            {"data_plane": plane},
        )


def check_machine() -> Iterator[Finding]:
    processor = _read(Path("/proc/cpuinfo")).partition("model name")[2].partition("\n")[0]
    if processor:
        yield Finding("machine", "processor", State.OK, processor.strip(" \t:"))
    yield _features(_read(Path("/proc/cpuinfo")))
    yield _cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, _read(_CGROUP / "cpu.max"))
    yield _memory(_read(Path("/proc/meminfo")), _read(_CGROUP / "memory.max"))
    yield _shared_memory(Path("/dev/shm"))
    yield _files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _features(cpuinfo: str) -> Finding:
    """What native kernels use of a processor, by the names of /proc/cpuinfo."""
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    found = [name for name in VECTORS if name in flags]
    facts = {"features": found}
    if {"avx2", "fma"} <= flags:
        return Finding("machine", "vectors", State.OK, ", ".join(found), facts=facts)
    text = f"{', '.join(found) or 'none that is known'}: kernels compute few numbers at once"
    remedy = (
        "a processor with AVX2 and FMA is several times as fast; a virtual machine may hide them"
    )
    return Finding("machine", "vectors", State.WARN, text, remedy, facts)


def locked_memory(*, rdma_wanted: bool) -> Finding:
    """RDMA pins what it registers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return _locked_memory(limit, _read(Path("/proc/self/status")), rdma_wanted=rdma_wanted)


def _locked_memory(limit: int, status: str, *, rdma_wanted: bool) -> Finding:
    unlimited = limit == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else size(limit)
    facts = {"bytes": None if unlimited else limit}
    if not unlimited and _is_exempt(status):
        text += ", which does not bind this process (CAP_IPC_LOCK)"
    elif not unlimited and rdma_wanted:
        text += ": rdma cannot register pools that are larger"
        remedy = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, IPC_LOCK in containers"
        return Finding("machine", "locked memory", State.WARN, text, remedy, facts)
    return Finding("machine", "locked memory", State.OK, text, facts=facts)


def _is_exempt(status: str) -> bool:
    """Whether /proc/self/status shows CAP_IPC_LOCK (bit 14, linux/capability.h)."""
    mask = status.partition("CapEff:")[2].split()
    return bool(mask) and bool(int(mask[0], 16) >> 14 & 1)


def _python(version: tuple[str, ...]) -> Finding:
    text = ".".join(version)
    facts = {"version": text}
    if tuple(map(int, version[:2])) >= LEAST_PYTHON:
        return Finding("software", "Python", State.OK, text, facts=facts)
    remedy = f"moonserve needs Python {'.'.join(map(str, LEAST_PYTHON))} or newer"
    return Finding("software", "Python", State.FAIL, text, remedy, facts)


def _package(name: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "moonserve":  # run from its source tree
            return Finding("software", name, State.WARN, "not installed", "pip install .")
        return Finding("software", name, State.FAIL, "not installed", f"pip install {name}")
    return Finding("software", name, State.OK, version, facts={"version": version})


def _cores(usable: int, present: int, quota: str) -> Finding:
    text = f"{usable} of {present}"
    facts: dict[str, float] = {"usable": usable, "present": present}
    words = quota.split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        facts["quota"] = int(words[0]) / int(words[1])
        text += f"; control group allows {facts['quota']:.3g}"
    if min(usable, facts.get("quota", usable)) >= 2:
        return Finding("machine", "cores", State.OK, text, facts=facts)
    remedy = "a prefill and a decode worker on one core slow each other down; allow at least 2"
    return Finding("machine", "cores", State.WARN, text, remedy, facts)


def _memory(meminfo: str, limit: str) -> Finding:
    kib = {
        words[0].rstrip(":"): int(words[1])
        for words in map(str.split, meminfo.splitlines())
        if len(words) > 1 and words[1].isdigit()
    }
    total, available = kib.get("MemTotal", 0) << 10, kib.get("MemAvailable", 0) << 10
    text = f"{size(total)}, {size(available)} available"
    if limit.isdigit():
        available = min(available, int(limit))
        text += f"; control group allows {size(int(limit))}"
    facts = {"total_bytes": total, "available_bytes": available}
    if available >= ENOUGH_AVAILABLE_BYTES:
        return Finding("machine", "memory", State.OK, text, facts=facts)
    remedy = "smaller pools: --kv-cache-memory and --dram of moonserve serve"
    return Finding("machine", "memory", State.WARN, text, remedy, facts)


def _shared_memory(folder: Path) -> Finding:
    """Segments are memfds and do not live there; torch's loaders and other programs' do."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        text = f"{error.strerror}; not needed by moonserve"
        return Finding("machine", str(folder), State.OK, text)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{size(total)}, {size(free)} free; not needed by moonserve"
    facts = {"total_bytes": total, "free_bytes": free}
    return Finding("machine", str(folder), State.OK, text, facts=facts)


def _files(soft: int, hard: int) -> Finding:
    unlimited = resource.RLIM_INFINITY
    text = "unlimited" if soft == unlimited else f"{soft} (can be raised to {hard})"
    facts = {"soft": soft, "hard": hard}
    if soft == unlimited or soft >= ENOUGH_FILES:
        return Finding("machine", "open files", State.OK, text, facts=facts)
    remedy = f"ulimit -n {max(ENOUGH_FILES, min(hard, 65536))} before starting many peers"
    return Finding("machine", "open files", State.WARN, text, remedy, facts)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
