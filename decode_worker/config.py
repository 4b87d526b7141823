"""Options of a decode worker, and the pool that follows from them and the model."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.limits import Limits
from engine.config import ModelConfig
from protocol.config import option
from protocol.errors import ConfigError
from protocol.layout import KvLayout
from protocol.process import ProcessConfig

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ProcessConfig):
    """Flags that vLLM has too mean the same."""

    model: str = option(help="local Hugging Face folder or hub name")
    dtype: str = option("auto", help="of weights and KV", choices=("auto", "float32", "bfloat16"))
    load_format: str = option(
        "auto", help="dummy = random weights, for measuring", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None,
        help="longest prompt plus output in tokens; what model and memory allow when not given",
    )
    block_size: int = option(32, help="tokens per KV block")
    kv_cache_memory: int = option(256 * MIB, help="bytes of KV", unit="bytes")
    max_num_seqs: int = option(64, help="sequences in one step")
    max_num_batched_tokens: int = option(512, help="tokens computed in one step")
    enable_prefix_caching: bool = option(True, help="share the KV of equal prefixes")
    num_threads: int = option(1, help="compute threads")
    profile_dir: str | None = option(
        None, help="folder that keeps measured speeds; below the user's cache folder when not given"
    )
    drain_timeout_s: float = option(
        5.0, help="seconds that running requests may take to finish when the worker stops"
    )

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.max_num_seqs}: each sequence of a step computes a token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How much KV the worker has, in blocks."""

    layout: KvLayout
    num_blocks: int
    limits: Limits


def plan_pool(config: DecodeConfig, model: ModelConfig) -> PoolPlan:
    """Raises ConfigError when the memory does not hold one sequence of the length that was asked for."""
    layout = model.kv_layout(config.block_size, config.dtype)
    num_blocks = config.kv_cache_memory // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} holds no block of {layout.block_bytes} bytes"
        )
    limits = Limits(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=_max_model_len(config, model, num_blocks * config.block_size),
    )
    return PoolPlan(layout=layout, num_blocks=num_blocks, limits=limits)


def _max_model_len(config: DecodeConfig, model: ModelConfig, pool_tokens: int) -> int:
    wish = config.max_model_len
    if wish is None:
        return min(model.max_position_embeddings, pool_tokens)
    if wish > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {wish} exceeds the model's {model.max_position_embeddings} positions"
        )
    if wish > pool_tokens:
        raise ConfigError(
            f"--max-model-len {wish} exceeds the {pool_tokens} tokens that --kv-cache-memory "
            f"{config.kv_cache_memory} holds"
        )
    return wish
