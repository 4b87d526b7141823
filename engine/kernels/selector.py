"""Selects the implementations of attention and of a model's other layers by name. Nothing below imports this module."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from moonserve.engine.kernels import AllReduce, Attention, Geometry, Heads, Kernels, Pass, Step
from moonserve.engine.kernels.native_attention import NativePagedAttention
from moonserve.engine.kernels.native_layers import NativeKernels
from moonserve.engine.kernels.native_library import ThreadPool
from moonserve.engine.kernels.shared_cores import SharedCores
from moonserve.engine.kernels.torch_attention import TorchPagedAttention
from moonserve.engine.kernels.torch_layers import TorchKernels
from moonserve.engine.kv_cache.tensors import KvTensors
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.config.latents import LatentHeads
from moonserve.engine.model.weights import Weights
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.process.native_libraries import CompilerError

ATTENTION_NAMES = KERNEL_NAMES = ("auto", "native", "torch", "triton")
TRANSFORMERS = "transformers"
"""Kernels of any decoder, which are no `Kernels`: the layers of transformers (`engine.kernels.transformers_model`)."""


def make_attention(
    name: str, geometry: Geometry, pool: KvTensors, cache_folder: Path | None, thread_pool: ThreadPool | None = None
) -> Attention:
    """Creates the implementation called `name`. auto means triton for a pool on a GPU, otherwise native, or torch
    without a `cache_folder`. Native attention runs in the threads of `thread_pool`, or in as many own threads as torch
    has. Raises ConfigError for an unknown name, or if the implementation is not available."""
    if name not in ATTENTION_NAMES:
        raise ConfigError(f"attention backend {name!r} is not one of {', '.join(ATTENTION_NAMES)}")
    name = _for_latents(name, geometry.latents)
    if name == "triton" or (name == "auto" and pool.device.type == "cuda"):
        from moonserve.engine.cuda.attention import TritonAttention  # not needed on CPUs

        return TritonAttention(geometry, pool)
    if name == "torch" or (name == "auto" and cache_folder is None):
        return TorchPagedAttention(geometry, pool)
    try:
        return NativePagedAttention(geometry, pool, cache_folder, thread_pool)
    except CompilerError as error:
        raise ConfigError(f"native attention is not available: {error}; or start with --kernels torch") from error


def _for_latents(name: str, latents: LatentHeads | None) -> str:
    """Returns the name, or native instead of auto for latent attention. Raises ConfigError for names without it."""
    if latents is not None and name not in ("auto", NativeKernels.name):
        raise ConfigError(f"{name} has no latent attention; start with --kernels native or {TRANSFORMERS}")
    return name if latents is None else NativeKernels.name


FEW_TOKENS = 16
"""Up to this many rows, a product takes the time of reading its weights."""


class MixedKernels:
    """Two `Kernels` over one model and pool, for steps of `few` and of `many` tokens. Used on processors where
    a library multiplies many rows faster (`suits_many_rows` of layers.cpp). The weights are then stored twice."""

    def __init__(self, few: Kernels, many: Kernels) -> None:
        self.name = f"{few.name}+{many.name}"
        self.few = few
        self.many = many
        self._chosen = few  # for the pass under way

    def begin(self, step: Step) -> Pass:
        self._chosen = self.few if len(step.token_ids) <= FEW_TOKENS else self.many
        return self._chosen.begin(step)

    def project(self, layer: int, work: Pass) -> Heads:
        return self._chosen.project(layer, work)

    def finish(self, layer: int, work: Pass, attended: torch.Tensor) -> None:
        self._chosen.finish(layer, work, attended)

    def hidden(self, work: Pass) -> torch.Tensor:
        return self._chosen.hidden(work)

    def select_rows(self, work: Pass, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._chosen.select_rows(work, rows, attended)

    def logits(self, work: Pass) -> torch.Tensor:
        return self._chosen.logits(work)


def keeps_integers(name: str, device: torch.device, cache_folder: Path | None) -> bool:
    """True if the kernels called `name` multiply quantised weights as they are."""
    return device.type == "cpu" and (name == "native" or (name == "auto" and cache_folder is not None))


def exact_rows(kernels: str, attention: str) -> int:
    """Returns the number of rows up to which a step with these implementations gives each output token the same bits,
    whatever else is in the step. 0: bits may differ in every step."""
    if attention != NativePagedAttention.name:
        return 0
    if kernels == NativeKernels.name:
        return sys.maxsize
    return FEW_TOKENS if kernels.startswith(f"{NativeKernels.name}+") else 0


def make_kernels(
    name: str,
    config: ModelConfig,
    weights: Weights,
    pool: KvTensors,
    *,
    num_threads: int,
    cache_folder: Path | None,
    compiling: Callable[[], None] | None = None,
    collectives: AllReduce | None = None,
    shared_cores: SharedCores | None = None,
) -> Kernels:
    """Creates the implementation called `name`. auto means triton on a GPU; otherwise native, mixed with torch if that
    is faster for prompts and weights are plain, without experts; or torch without a `cache_folder`. Native kernels run
    in `num_threads` own threads and in those that `shared_cores` gives, torch's in the process's. `compiling` is called
    before a compilation, which takes seconds. `collectives`: for a rank with a share of the model. Raises ConfigError
    for an unknown name, or if the implementation is not available."""
    if name not in KERNEL_NAMES:
        raise ConfigError(f"kernels {name!r} are not one of {', '.join(KERNEL_NAMES)}")
    if name == "triton" or pool.device.type == "cuda":
        return _triton_kernels(name, config, weights, pool)
    name = _for_latents(name, config.latent_heads)
    if name == "torch" or (name == "auto" and cache_folder is None):
        return TorchKernels(config, weights, pool, collectives)
    try:
        native = NativeKernels(config, weights, pool, num_threads, cache_folder, compiling, collectives, shared_cores)
    except CompilerError as error:
        other = "torch" if config.latent_heads is None else TRANSFORMERS
        raise ConfigError(f"native kernels are not available: {error}; or start with --kernels {other}") from error
    if name == "native" or native.suits_many_rows or weights.is_quantised or config.experts is not None:
        return native
    return MixedKernels(native, TorchKernels(config, weights, pool, collectives))


def _triton_kernels(name: str, config: ModelConfig, weights: Weights, pool: KvTensors) -> Kernels:
    from moonserve.engine.cuda.layers import TritonKernels  # not needed on CPUs

    if name not in ("auto", "triton"):
        raise ConfigError(f"the {name} kernels run on CPUs only; start with --kernels triton or auto")
    if config.experts is not None:
        raise ConfigError("mixtures of experts are not supported on GPUs; start with --device cpu, or --engine vllm")
    return TritonKernels(config, weights, pool)


def thread_pool_of(kernels: Kernels) -> ThreadPool | None:
    """Returns the threads of native kernels, or None. Attention shares them, since they are idle between calls."""
    if isinstance(kernels, MixedKernels):
        return thread_pool_of(kernels.few)
    return kernels.thread_pool if isinstance(kernels, NativeKernels) else None
