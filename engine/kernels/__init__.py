"""Kernels of a model's layers: the implementations, selected by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.kernels.base import Heads, Kernels, Pass, Sums
from engine.kernels.library import Crew
from engine.kernels.native_kernels import NativeKernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_pool import KvPool
from engine.step import Step
from engine.weights import Weights
from protocol.errors import ConfigError
from protocol.native import CompilerError

__all__ = [
    "NAMES",
    "Crew",
    "Kernels",
    "MixedKernels",
    "NativeKernels",
    "Sums",
    "TorchKernels",
    "crew_of",
    "make_kernels",
]

NAMES = ("auto", "native", "torch", "triton")


FEW_TOKENS = 16
"""Up to this many rows, a product takes the time of reading its weights."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    kernels: Kernels
    work: Pass


class MixedKernels:
    """Two `Kernels` over one model and pool, for steps of `few` and of `many` tokens. Used on processors with matrix
    units that a library uses and our own products do not. The weights are then stored twice."""

    def __init__(self, few: Kernels, many: Kernels) -> None:
        self.name = f"{few.name}+{many.name}"
        self.few = few
        self.many = many

    def begin(self, step: Step) -> _Chosen:
        kernels = self.few if len(step.token_ids) <= FEW_TOKENS else self.many
        return _Chosen(kernels, kernels.begin(step))

    def project(self, layer: int, work: _Chosen) -> Heads:
        return work.kernels.project(layer, work.work)

    def finish(self, layer: int, work: _Chosen, seen: torch.Tensor) -> None:
        work.kernels.finish(layer, work.work, seen)

    def hidden(self, work: _Chosen) -> torch.Tensor:
        return work.kernels.hidden(work.work)

    def keep(self, work: _Chosen, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return work.kernels.keep(work.work, rows, seen)

    def logits(self, work: _Chosen) -> torch.Tensor:
        return work.kernels.logits(work.work)


def make_kernels(
    name: str,
    config: ModelConfig,
    weights: Weights,
    pool: KvPool,
    *,
    num_threads: int,
    cache_folder: Path | None,
    compiling: Callable[[], None] | None = None,
    sums: Sums | None = None,
) -> Kernels:
    """Creates the implementation called `name`. auto means triton on a GPU; otherwise native, mixed with torch if that
    is faster for prompts; or torch without a `cache_folder`. Native kernels run in `num_threads` own threads, torch's
    in the process's. `compiling` is called before a compilation, which takes seconds. `sums`: for a rank with a share
    of the model. Raises ConfigError for an unknown name, or if the implementation is not available."""
    if name not in NAMES:
        raise ConfigError(f"kernels {name!r} are not one of {', '.join(NAMES)}")
    if name == "triton" or pool.device.type == "cuda":
        return _triton_kernels(name, config, weights, pool)
    if name == "torch" or (name == "auto" and cache_folder is None):
        return TorchKernels(config, weights, pool, sums)
    try:
        native = NativeKernels(config, weights, pool, num_threads, cache_folder, compiling, sums)
    except CompilerError as error:
        raise ConfigError(f"the native kernels cannot be had: {error}; or --kernels torch") from error
    if name == "native" or native.suits_many_rows:
        return native
    return MixedKernels(native, TorchKernels(config, weights, pool, sums))


def _triton_kernels(name: str, config: ModelConfig, weights: Weights, pool: KvPool) -> Kernels:
    from engine.cuda.triton_kernels import TritonKernels  # here, to avoid a circular import

    if name not in ("auto", "triton"):
        raise ConfigError(f"the {name} kernels are for CPUs: --kernels triton, or auto")
    return TritonKernels(config, weights, pool)


def crew_of(kernels: Kernels) -> Crew | None:
    """Returns the threads of native kernels, or None. Attention shares them, since they are idle between calls."""
    if isinstance(kernels, MixedKernels):
        return crew_of(kernels.few)
    return kernels.crew if isinstance(kernels, NativeKernels) else None
