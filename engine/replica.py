"""One replica of a model as a worker process runs it: its options, how much KV it has, how it is loaded and measured.

Imports torch only while it loads, so that a wrong option is told at once. Does not know whose memory it is given, nor
what the worker does with the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.config import ModelConfig, load_model_config
from engine.hub import resolve_model
from engine.stage import Stage, split
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError
from protocol.layout import KvLayout
from protocol.machine import cache_folder
from protocol.pb import common_pb2, conductor_pb2
from protocol.process import Lifecycle, ProcessConfig
from protocol.request import Endpoint
from protocol.wire import endpoint_to_wire, layout_to_wire

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.runtime import EngineThread

MIB = 2**20

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ProcessConfig):
    """Options of every worker. Flags that vLLM has too mean the same."""

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
    kernels: str = option(
        "auto",
        help="what computes layers and attention: auto = native, compiled at the first start, or torch where there is "
        "no compiler",
        choices=("auto", "native", "torch"),
    )
    cache_dir: str | None = option(
        None,
        help="folder that keeps compiled kernels and measured speeds; ~/.cache/moonserve when not given",
    )
    drain_timeout_s: float = option(
        5.0, help="seconds that requests may take to finish when the worker stops"
    )
    metrics_port: int = option(0, help="port for Prometheus metrics; 0 = none")

    def __post_init__(self) -> None:
        require_at_least_1(self, "block_size", "max_num_seqs", "num_threads")

    @property
    def can_switch_role(self) -> bool:
        """Whether the worker serves `RoleSwitch`."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How much KV a replica has, and the longest sequence that it takes."""

    layout: KvLayout  # of the whole model
    num_blocks: int  # the same at all stages
    max_model_len: int
    stage: Stage

    @property
    def own_layout(self) -> KvLayout:
        """Of what lies in the replica's own memory."""
        return self.layout.of_layers(len(self.stage.layers))


def plan_pool(
    config: ReplicaConfig, model: ModelConfig, *, rank: int = 0, num_stages: int = 1
) -> PoolPlan:
    """Of one of a pipeline's stages, each of which has the configured memory. Raises ConfigError when the memory does
    not hold one sequence of the length that was asked for, or the model has fewer layers than there are stages."""
    layout = model.kv_layout(config.block_size, config.dtype)
    stages = split(model.num_layers, num_stages)
    block_bytes = max(layout.of_layers(len(stage.layers)).block_bytes for stage in stages)
    num_blocks = config.kv_cache_memory // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} holds no block of {block_bytes} bytes"
        )
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size)
    return PoolPlan(
        layout=layout, num_blocks=num_blocks, max_model_len=max_model_len, stage=stages[rank]
    )


def _max_model_len(config: ReplicaConfig, model: ModelConfig, pool_tokens: int) -> int:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A loaded engine in its thread, which its user closes, and what the cluster is told about it."""

    config: ReplicaConfig
    plan: PoolPlan
    thread: EngineThread
    profiles: Profiles

    @property
    def fingerprint(self) -> str:
        return self.thread.engine.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.thread.engine.config.vocab_size

    def registration(
        self, endpoint: Endpoint, role: common_pb2.Role.ValueType
    ) -> conductor_pb2.RegisterRequest:
        """What a worker says of itself to the conductor."""
        prefill, decode = self.profiles
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(endpoint),
            role=role,
            layout=layout_to_wire(self.plan.layout),
            fingerprint=self.fingerprint,
            num_blocks=self.plan.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.plan.max_model_len,
            prefill_profile=prefill,
            decode_profile=decode,
            can_switch_role=self.config.can_switch_role,
        )


class Memory(Protocol):
    """Where a replica's KV lies: a segment of the transfer engine."""

    @property
    def buffer(self) -> memoryview: ...


M = TypeVar("M", bound=Memory)


@contextlib.asynccontextmanager
async def loaded_replica(
    config: ReplicaConfig,
    allocate: Callable[[int], M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
) -> AsyncIterator[tuple[Replica, M]]:
    """As `load_replica`; its engine's thread ends with the block."""
    replica, memory = await load_replica(
        config, allocate, lifecycle, rank=rank, num_stages=num_stages
    )
    with contextlib.closing(replica.thread):
        yield replica, memory


async def load_replica(
    config: ReplicaConfig,
    allocate: Callable[[int], M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
) -> tuple[Replica, M]:
    """The replica, or one stage of a pipeline of several, and the memory that it had `allocate` make for its KV. Of a
    pipeline the first stage's speed is measured, which is the pace of all. Raises ConfigError."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = load_model_config(path)
    plan = plan_pool(config, model, rank=rank, num_stages=num_stages)
    lifecycle.progress("allocating memory")
    memory = await asyncio.to_thread(_allocate, allocate, plan)
    thread = await asyncio.to_thread(
        _load, path, model, config, plan, memory.buffer, lifecycle.progress
    )
    profiles = conductor_pb2.PrefillProfile(), conductor_pb2.DecodeProfile()
    if plan.stage.is_first:
        lifecycle.progress("measuring")
        profiles = await thread.run(lambda: _measure(thread.engine, config))
    return Replica(config=config, plan=plan, thread=thread, profiles=profiles), memory


def _allocate(allocate: Callable[[int], M], plan: PoolPlan) -> M:
    nbytes = plan.own_layout.pool_bytes(plan.num_blocks)
    try:
        return allocate(nbytes)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"{nbytes} bytes of KV: {error}; lower --kv-cache-memory") from error


def _load(
    path: Path,
    model: ModelConfig,
    config: ReplicaConfig,
    plan: PoolPlan,
    memory: memoryview,
    progress: Callable[[str, float], None],
) -> EngineThread:
    # Here and below, so that a wrong option is told before torch is imported.
    from engine.engine import Engine
    from engine.runtime import EngineThread

    engine = Engine.load(
        path,
        config=model,
        layout=plan.layout,
        num_blocks=plan.num_blocks,
        memory=memory,
        stage=plan.stage,
        num_threads=config.num_threads,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        cache_folder=_cache_folder(config),
        progress=progress,
    )
    return EngineThread(engine)


def _measure(engine: Engine, config: ReplicaConfig) -> Profiles:
    """How fast this engine is, for the conductor's predictions. Overwrites the pool."""
    from engine.profile import measure_cached

    folder = _cache_folder(config) / "profiles"
    return measure_cached(engine, folder, chunk_tokens=config.max_num_batched_tokens)


def _cache_folder(config: ReplicaConfig) -> Path:
    return Path(config.cache_dir) if config.cache_dir else cache_folder(os.environ, Path.home())
