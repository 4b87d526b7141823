"""Checks of `moonserve doctor` that need no transfer: software, processor, cores, memory, limits.

Only an old Python, a missing package or missing compiled code is a failure. Any other shortage is a warning.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from deploy.doctor.findings import Finding
from deploy.terminal.output import size
from protocol.errors import ConfigError
from transfer.native import data_plane

PACKAGES = ("moonserve", "torch", "transformers", "numpy", "grpcio", "xxhash")
VECTORS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
LEAST_PYTHON = (3, 11)  # pyproject.toml
ENOUGH_FILES = 4096  # per process, for a connection per peer and stream and a descriptor per segment
ENOUGH_AVAILABLE_BYTES = 2 << 30  # the approximate need of the demo cluster with default pools
_CGROUP = Path("/sys/fs/cgroup")


def check_software() -> Iterator[Finding]:
    version = platform.python_version()
    is_old = tuple(map(int, version.split(".")[:2])) < LEAST_PYTHON
    remedy = f"moonserve needs Python {'.'.join(map(str, LEAST_PYTHON))} or newer" if is_old else ""
    yield Finding("software", "Python", version, remedy, fails=is_old)
    for name in PACKAGES:
        yield _package(name)
    yield _compiled()


def check_machine() -> Iterator[Finding]:
    yield _features(_read(Path("/proc/cpuinfo")))
    yield _cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, _read(_CGROUP / "cpu.max"))
    yield _memory(_read(Path("/proc/meminfo")), _read(_CGROUP / "memory.max"))
    yield _files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def locked_memory(*, rdma_wanted: bool) -> Finding:
    """Returns the finding for the limit on locked memory, which counts because RDMA pins registered memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return _locked_memory(limit, _read(Path("/proc/self/status")), rdma_wanted=rdma_wanted)


def _package(name: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        is_tree = name == "moonserve"  # not installed, but run from its source tree
        remedy = f"pip install {'.' if is_tree else name}"
        return Finding("software", name, "not installed", remedy, fails=not is_tree)
    return Finding("software", name, version)


def _compiled() -> Finding:
    """Checks the compiled code that every process needs. It comes with a wheel or is built by a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    try:
        data_plane()
    except ConfigError as error:
        remedy = "install one (Debian: apt-get install gcc libc6-dev) and start again"
        return Finding("software", "C compiler", error.message, remedy, fails=True)
    text = compiler or "none, but compiled code is there"
    return Finding("software", "C compiler", text)


def _features(cpuinfo: str) -> Finding:
    """Checks the processor features that native kernels use. `cpuinfo`: contents of /proc/cpuinfo."""
    model = cpuinfo.partition("model name")[2].partition("\n")[0].strip(" \t:")
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    found = [name for name in VECTORS if name in flags]
    text, remedy = ", ".join(found), ""
    if not {"avx2", "fma"} <= flags:
        text = f"{text or 'no vectors that are known'}: kernels compute few numbers at once"
        remedy = "a processor with AVX2 and FMA is several times as fast; a virtual machine may hide them"
    text = f"{model}: {text}" if model else text
    return Finding("machine", "processor", text, remedy)


def _cores(usable: int, present: int, quota: str) -> Finding:
    text = f"{usable} of {present}"
    words, allowed = quota.split(), float(usable)
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        allowed = int(words[0]) / int(words[1])
        text += f"; control group allows {allowed:.3g}"
    is_short = min(usable, allowed) < 2
    remedy = "a prefill and a decode worker on one core slow each other down; allow at least 2"
    return Finding("machine", "cores", text, remedy if is_short else "")


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
    remedy = "smaller pools: --kv-cache-memory and --dram of moonserve serve"
    is_short = available < ENOUGH_AVAILABLE_BYTES
    return Finding("machine", "memory", text, remedy if is_short else "")


def _files(soft: int, hard: int) -> Finding:
    is_unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if is_unlimited else f"{soft} (can be raised to {hard})"
    remedy = f"ulimit -n {max(ENOUGH_FILES, min(hard, 65536))} before starting many peers"
    is_short = not is_unlimited and soft < ENOUGH_FILES
    return Finding("machine", "open files", text, remedy if is_short else "")


def _locked_memory(limit: int, status: str, *, rdma_wanted: bool) -> Finding:
    is_unlimited = limit == resource.RLIM_INFINITY
    text, remedy = "unlimited" if is_unlimited else size(limit), ""
    if not is_unlimited and _is_exempt(status):
        text += ", which does not bind this process (CAP_IPC_LOCK)"
    elif not is_unlimited and rdma_wanted:
        text += ": rdma cannot register pools that are larger"
        remedy = "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in systemd, IPC_LOCK in containers"
    return Finding("machine", "locked memory", text, remedy)


def _is_exempt(status: str) -> bool:
    """Returns True if /proc/self/status shows CAP_IPC_LOCK (bit 14, linux/capability.h)."""
    mask = status.partition("CapEff:")[2].split()
    return bool(mask) and bool(int(mask[0], 16) >> 14 & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
