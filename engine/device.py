"""Where a replica computes: `--device`. Imports torch only where there may be a GPU.

`cpu-staged` is a device for tests, on any machine: it computes on the CPU from memory that nothing but `engine.staging`
reaches, as a GPU's is, so that whoever forgets to load or to store is found out without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

CPU, CUDA, STAGED = "cpu", "cuda", "cpu-staged"
DEVICES = ("auto", CPU, CUDA, STAGED)

# What drivers show: one folder per GPU, one device file per GPU, and the only one under WSL.
_TRACES = (("/proc/driver/nvidia/gpus", "*"), ("/dev", "nvidia[0-9]*"), ("/dev", "dxg"))


def resolve_device(wish: str) -> str:
    """One of `cpu`, `cuda`, `cpu-staged`; auto is cuda where that can be had. Raises ConfigError, saying what to do,
    where cuda was asked for and cannot be had."""
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
    """One that a worker can compute on."""

    name: str
    total_bytes: int
    free_bytes: int


def usable_gpus() -> list[Gpu]:
    """By torch's numbers. Imports torch, and takes some memory of each. Raises ConfigError, saying what to do, where
    none can be used."""
    from engine.cuda.requirements import gpus, why_not_cuda

    if (reason := why_not_cuda()) is not None:
        raise ConfigError(reason)
    return [Gpu(*found) for found in gpus()]


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them: those of that variable, or all."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip())
    return tuple(map(str, range(count_gpus())))


def count_gpus(root: Path = Path("/")) -> int:
    """How many GPUs the machine's drivers show, whether torch can use them or not."""
    return max(len(list((root / folder.lstrip("/")).glob(pattern))) for folder, pattern in _TRACES)
