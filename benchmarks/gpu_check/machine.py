"""Describes the machine, for the head of the table."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe(device: torch.device) -> dict[str, str]:
    """Returns the names and versions of hardware and software."""
    found = {
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        **{name: _version(name) for name in ("triton", "transformers")},
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found["gpu"] = f"{gpu.name}, {gpu.multi_processor_count} multiprocessors"
        found["gpu memory"] = f"{gpu.total_memory / 2**30:.0f} GiB"
        found["compute capability"] = f"{gpu.major}.{gpu.minor}"
        found["driver"] = _driver()
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown (no nvidia-smi)"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()
