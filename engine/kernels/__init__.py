"""What computes a model's layers, one file per implementation, chosen by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from engine.config import ModelConfig
from engine.kernels.base import Kernels, Sums
from engine.kernels.library import Crew
from engine.kernels.mixed import MixedKernels
from engine.kernels.native_kernels import NativeKernels
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_pool import KvPool
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

log = logging.getLogger(__name__)


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
    """The implementation called `name`; auto takes native where it can be had, and torch for prompts where that is
    faster at them. Native kernels work in `num_threads` threads of their own, torch's in the process's. `compiling` is
    called before something is compiled, which takes seconds. `sums`: for a
    rank, whose share of the model these are. Raises ConfigError for an unknown name and for native
    where it cannot be had."""
    if name not in NAMES:
        raise ConfigError(f"kernels {name!r} are not one of {', '.join(NAMES)}")
    if name == "triton" or pool.device.type == "cuda":
        return _triton_kernels(name, config, weights, pool)
    if name == "torch" or (name == "auto" and cache_folder is None):
        return TorchKernels(config, weights, pool, sums)
    try:
        native = NativeKernels(config, weights, pool, num_threads, cache_folder, compiling, sums)
    except CompilerError as error:
        if name == "native":
            raise ConfigError(f"the native kernels are not available: {error}") from error
        log.warning("native kernels not available, using torch: %s", error)
        return TorchKernels(config, weights, pool, sums)
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
