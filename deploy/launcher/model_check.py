"""Finds a cluster's model, and refuses one that cannot be served before weights are downloaded or processes start."""

import sys
from pathlib import Path

from moonserve.deploy.launcher.config import ServeConfig
from moonserve.engine.config import DEFAULT_KV_BYTES
from moonserve.engine.cuda.device import CPU, STAGED, count_gpus
from moonserve.engine.kv_cache.pool_size import require_positions, weight_bytes
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.model_folder import GGUF, resolve_model
from moonserve.engine.model.transformers_config import read_config
from moonserve.models import demo_model_path
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import DTYPE_BYTES
from moonserve.protocol.process.machine import available_memory_bytes

_GIB = 2**30
_LEAST_SHARE = 0.75
"""Share of bfloat16 weights that the native kernels keep in memory at least."""


def model_folder(config: ServeConfig, *, is_one_host: bool = True) -> Path:
    """Returns the folder of the cluster's model and downloads what is missing. The own engine's models are judged by
    config.json first. `is_one_host`: all workers are on this machine and share its memory. Raises ConfigError, which
    says what would work."""

    def judge(folder: Path) -> None:
        if config.engine != "moonserve":
            return
        model = read_config(folder)
        require_positions(model, config.max_model_len)
        if not model.has_own_kernels:
            slow = f"transformers computes {model.architecture}, slower than the own families"
            print(f"moonserve: {slow}; --engine vllm may be faster (docs/models.md)", file=sys.stderr)
        elif is_one_host and (config.device in (CPU, STAGED) or not count_gpus()):
            _require_memory(config, model, available_memory_bytes())

    if config.engine != "moonserve" and (config.model or "").endswith(GGUF):
        raise ConfigError(f"{GGUF} files are served by moonserve's own engine only, not with --engine {config.engine}")
    return resolve_model(config.model or str(demo_model_path()), judge)


def _require_memory(config: ServeConfig, model: ModelConfig, available: int | None) -> None:
    """Raises ConfigError if the weights and KV of all workers certainly exceed the available bytes."""
    dtype = model.resolve_dtype(config.dtype)
    format = dtype if config.quantize == "auto" else config.quantize
    if model.quantised is not None and not model.quantised.is_float:
        format = f"the format of {model.quantised.method}"
    weights = weight_bytes(model, DTYPE_BYTES[dtype], config.quantize) * (_LEAST_SHARE if format == "bfloat16" else 1.0)
    kv = config.kv_cache_memory or DEFAULT_KV_BYTES
    if config.is_elastic:
        kv = config.memory_floor
    needed = config.num_workers * (weights + kv)
    if available is not None and needed > available:
        raise ConfigError(
            f"{config.num_workers} workers need {needed / _GIB:.1f} GiB, each at least {weights / _GIB:.1f} GiB for "
            f"weights in {format} and {kv / _GIB:.1f} GiB for KV, and {available / _GIB:.1f} GiB are left on this "
            "machine: choose a smaller model, fewer workers or less --kv-cache-memory"
        )
