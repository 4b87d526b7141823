"""Options of a prefill worker, and the pool and limits that follow from them and the model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig
from prefill_worker.ledger import Limits
from protocol.config import option
from protocol.errors import ConfigError
from protocol.layout import KvLayout
from protocol.process import ProcessConfig
from transfer import FaultPlan

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(ProcessConfig):
    """Flags that vLLM has too mean the same."""

    model: str = option(help="local Hugging Face folder or hub name")
    dtype: str = option("auto", help="of weights and KV", choices=("auto", "float32", "bfloat16"))
    load_format: str = option(
        "auto", help="dummy = random weights, for measuring", choices=("auto", "dummy")
    )
    max_model_len: int | None = option(
        None, help="longest prompt in tokens; what model and memory allow when not given"
    )
    block_size: int = option(32, help="tokens per KV block")
    kv_cache_memory: int = option(256 * MIB, help="bytes of KV", unit="bytes")
    max_num_seqs: int = option(64, help="sequences in one step")
    max_num_batched_tokens: int = option(512, help="tokens computed in one step")
    enable_chunked_prefill: bool = option(
        True, help="cut long prompts into several steps; otherwise a step takes any prompt whole"
    )
    enable_prefix_caching: bool = option(True, help="keep the KV of prompts for later ones")
    scheduling_policy: str = option(
        "fcfs", help="order of waiting requests", choices=("fcfs", "priority")
    )
    num_threads: int = option(1, help="compute threads")
    profile_dir: str | None = option(
        None, help="folder that keeps measured speeds; ~/.cache/moonserve/profiles when not given"
    )
    home_store: str | None = option(
        None, help="instance id of the store node that keeps this worker's blocks"
    )
    prepare_ahead: int = option(
        4, help="waiting requests whose landing and prefix are fetched ahead, at least"
    )
    max_put_blocks: int = option(64, help="blocks on their way to the home store at once")
    max_pending_puts: int = option(4096, help="blocks waiting for that; more are dropped")
    landing_ttl_s: float = option(30.0, help="life of a landing lease between renewals, seconds")
    drain_timeout_s: float = option(
        5.0, help="seconds that requests may take to finish when the worker stops"
    )
    fault_corrupt_writes: int = option(0, help="corrupt this many KV writes, for fault tests")
    fault_drop_connections: int = option(
        0, help="drop this many transfer connections, for fault tests"
    )
    fault_delay_s: float = option(0.0, help="delay every transfer, seconds, for fault tests")

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
            "prepare_ahead",
            "max_put_blocks",
            "max_pending_puts",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.landing_ttl_s <= 0:
            raise ConfigError("--landing-ttl-s must be above 0")
        if self.home_store is not None and self.conductor is None:
            raise ConfigError("--home-store needs --conductor, which knows where the store is")

    def faults(self) -> FaultPlan:
        """What goes wrong on purpose."""
        return FaultPlan(
            corrupt_writes=self.fault_corrupt_writes,
            drop_connections=self.fault_drop_connections,
            delay_s=self.fault_delay_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How much KV the worker has, in blocks, and what it may do with it."""

    layout: KvLayout
    limits: Limits


def plan_pool(config: PrefillConfig, model: ModelConfig) -> PoolPlan:
    """Raises ConfigError when the memory does not hold one prompt of the length that was asked for."""
    layout = model.kv_layout(config.block_size, config.dtype)
    num_blocks = config.kv_cache_memory // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} holds no block of "
            f"{layout.block_bytes} bytes"
        )
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size)
    max_chunk = config.max_num_batched_tokens if config.enable_chunked_prefill else max_model_len
    limits = Limits(
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_chunk,
        max_num_seqs=config.max_num_seqs,
        lookahead=config.prepare_ahead,
        max_put_blocks=config.max_put_blocks,
        max_pending_puts=config.max_pending_puts,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return PoolPlan(layout=layout, limits=limits)


def _max_model_len(config: PrefillConfig, model: ModelConfig, pool_tokens: int) -> int:
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
