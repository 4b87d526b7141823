"""Checks of `moonserve doctor` that need no transfer: software, processor, cores, memory, limits, GPUs, RDMA ports.

Only an old Python, a missing package or missing compiled code is a failure. Any other shortage is a warning. If the
drivers show no GPU, torch is not imported, which would take seconds.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path

from moonserve.deploy.diagnostics.doctor_findings import Finding
from moonserve.deploy.terminal import size
from moonserve.engine.cuda.device import Gpu, count_gpus, usable_gpus
from moonserve.protocol.errors import ConfigError
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.rdma.device import Port, discover_ports

PACKAGES = ("moonserve", "numpy", "grpcio", "xxhash")
SERVE_PACKAGES = ("torch", "transformers")  # of the extra `serve`, which store nodes and conductors do not need
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
    for name in PACKAGES + SERVE_PACKAGES:
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
        if name in SERVE_PACKAGES:
            return Finding("software", name, "not installed", "gateways and workers: pip install 'moonserve[serve]'")
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
    return Finding("software", "C compiler", compiler or "none, but compiled code is there")


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


# -- GPUs and RDMA ports

_ROUTES = Path("/proc/net/route")
_UP = 0x1  # RTF_UP, linux/route.h


def check_gpus() -> list[Finding]:
    """Returns one finding per GPU, or a single one if there is no usable GPU."""
    num_shown = count_gpus()
    if num_shown == 0:
        return [Finding("gpu", "devices", "none; workers compute on the processor")]
    try:
        return [_usable(number, gpu) for number, gpu in enumerate(usable_gpus())]
    except ConfigError as error:
        why = error.message
    except ImportError as error:
        why = f"torch cannot be imported ({error}): pip install torch"
    text = f"{num_shown} shown by the driver, none used: workers compute on the processor"
    return [Finding("gpu", "devices", text, why)]


def _usable(number: int, gpu: Gpu) -> Finding:
    text = f"{gpu.name}, {size(gpu.total_bytes)}, {size(gpu.free_bytes)} free"
    remedy = "end what uses it (nvidia-smi), or give workers less: --gpu-memory-utilization"
    is_taken = 2 * gpu.free_bytes < gpu.total_bytes
    return Finding("gpu", f"cuda:{number}", text, remedy if is_taken else "")


def check_rdma() -> Iterator[Finding]:
    """Yields one finding per RDMA port, or a single one if there is no port."""
    ports = discover_ports()
    if not ports:
        yield Finding("rdma", "devices", "none; KV between machines goes over tcp")
        return
    table = _ROUTES.read_text() if _ROUTES.exists() else ""
    for port in ports:
        yield port_finding(port, table)


def port_finding(port: Port, table: str) -> Finding:
    """Returns the finding for an RDMA port. `table`: contents of /proc/net/route."""
    found = routes_of(port, table)
    where = f"; routes to {', '.join(found)}" if found else ""
    return Finding("rdma", port.name, f"{port}{where}", _remedy(port, found))


def routes_of(port: Port, table: str) -> list[str]:
    """Returns the networks that are routed through the interface of the port's GID; 0.0.0.0/0 is the default route."""
    interface = port.gid.netdev if port.gid else None
    rows = (line.split() for line in table.splitlines()[1:])
    return [
        str(IPv4Network((_address(row[1]), _address(row[7]))))
        for row in rows
        if len(row) > 7 and row[0] == interface and int(row[3], 16) & _UP
    ]


def _address(digits: str) -> str:
    """Converts the kernel's hexadecimal form, in which an address is a number in the machine's byte order."""
    return socket.inet_ntoa(struct.pack("=I", int(digits, 16)))


def _remedy(port: Port, routes: Sequence[str]) -> str:
    """Returns "" for a usable port. Routes of InfiniBand are not checked: its subnet manager sets them."""
    if port.state != "ACTIVE":
        return "rdma link show; the cable, or ip link set INTERFACE up"
    if port.gid is None:
        return "give its interface an address that peers can route to: ip address add"
    if port.is_ethernet and port.gid.address.ipv4_mapped is not None and not routes:
        name = port.gid.netdev
        return f"no route leads through {name}: ip route add NETWORK dev {name}"
    return ""
