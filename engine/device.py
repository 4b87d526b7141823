"""Resolves `--device` and finds GPUs. Imports torch only if there may be a GPU.

`cpu-staged` is a device for tests on any machine. It computes on the CPU, but from memory that only `engine.staging`
reaches, like a GPU's, so that a missing load or store is detected without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

CPU, CUDA, STAGED = "cpu", "cuda", "cpu-staged"
DEVICES = ("auto", CPU, CUDA, STAGED)

# Traces of the drivers: a folder per GPU, a device file per GPU, and the single device file under WSL.
_TRACES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))


def resolve_device(wish: str) -> str:
    """Returns `cpu`, `cuda` or `cpu-staged`; auto means cuda if it is usable, else cpu. Raises ConfigError, with the
    remedy, if cuda is requested but not usable."""
    if wish in (CPU, STAGED) or (wish == "auto" and count_gpus() == 0):
        return wish if wish != "auto" else CPU
    from engine.cuda.requirements import why_not_cuda  # imports torch

    reason = why_not_cuda()
    if reason is None:
        return CUDA
    if wish == "auto":
        return CPU
    raise ConfigError(f"--device cuda: {reason}; or compute on processors: --device cpu")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a worker can compute on."""

    name: str
    total_bytes: int
    free_bytes: int


def usable_gpus() -> list[Gpu]:
    """Returns the usable GPUs in the order of torch's device numbers. Imports torch and takes some memory of each GPU.
    Raises ConfigError, with the remedy, if none is usable."""
    from engine.cuda.requirements import gpus, why_not_cuda

    if (reason := why_not_cuda()) is not None:
        raise ConfigError(reason)
    return [Gpu(*found) for found in gpus()]


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPU names in CUDA_VISIBLE_DEVICES, or the numbers of all GPUs if it is not set."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    return tuple(map(str, range(count_gpus())))


def count_gpus(root: Path = Path("/")) -> int:
    """Returns how many GPUs the drivers show, whether torch can use them or not."""
    return max(len(list((root / folder.lstrip("/")).glob(pattern))) for folder, pattern in _TRACES)
