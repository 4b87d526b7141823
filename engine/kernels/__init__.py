"""What computes a model's layers, one file per implementation, chosen by name."""

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
"""A product of so many rows and fewer takes the time of reading its weights."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    kernels: Kernels
    work: Pass


class MixedKernels:
    """Two `Kernels` over the same model and pool, each for the steps that it is fast at: `few` tokens or `many`. For
    processors whose matrix units a library knows to use and our own products do not. The weights lie twice then."""

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
    """The implementation called `name`; auto is native, with torch for prompts where that is faster at them, and torch
    alone without a `cache_folder`. Native kernels work in `num_threads` threads of their own, torch's in the process's.
    `compiling` is called before something is compiled, which takes seconds. `sums`: for a rank, whose share of the
    model these are. Raises ConfigError for an unknown name and for native where it cannot be had."""
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
    from engine.cuda.triton_kernels import TritonKernels  # it imports this package

    if name not in ("auto", "triton"):
        raise ConfigError(f"the {name} kernels are for CPUs: --kernels triton, or auto")
    return TritonKernels(config, weights, pool)


def crew_of(kernels: Kernels) -> Crew | None:
    """The threads of native kernels, which attention shares: between two of their calls they have nothing to do."""
    if isinstance(kernels, MixedKernels):
        return crew_of(kernels.few)
    return kernels.crew if isinstance(kernels, NativeKernels) else None
