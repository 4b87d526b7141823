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

from engine.blanks import Blanks
from engine.config import ModelConfig, load_model_config
from engine.elastic.config import LedgerConfig
from engine.elastic.elasticity import Elasticity
from engine.elastic.elasticity import Memory as ElasticMemory
from engine.elastic.paging import Paging
from engine.hub import resolve_model
from engine.prefix import DEFAULT_EVICTION, EVICTION_NAMES
from engine.stage import Stage, split
from protocol.config import option, require_at_least_1
from protocol.errors import ConfigError
from protocol.layout import KV_DTYPES, KvLayout
from protocol.machine import cache_folder
from protocol.pb import common_pb2, conductor_pb2
from protocol.process import Lifecycle, ProcessConfig
from protocol.request import Endpoint
from protocol.wire import endpoint_to_wire, layout_to_wire

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.runtime import EngineThread
    from engine.tensor_parallel.processes import RankProcesses
    from engine.tensor_parallel.team import Team

MIB = 2**20

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig(ProcessConfig, LedgerConfig):
    """Options of every worker. Flags that vLLM has too mean the same."""

    model: str = option(help="local Hugging Face folder or hub name")
    dtype: str = option(
        "auto",
        help="of weights and, unless it is quantised, of KV",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        help="of KV: auto = as --dtype; fp8 (E4M3) and int8 quantise it, a scale per token and head, with some loss "
        "(docs/kv-dtypes.md)",
        choices=("auto", *KV_DTYPES),
    )
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
    prefix_eviction: str = option(
        DEFAULT_EVICTION,
        help="which cached KV makes room first: least recently (lru) or least frequently used (lfu, counts age)",
        choices=EVICTION_NAMES,
    )
    num_threads: int = option(1, help="compute threads")
    tensor_parallel_size: int = option(
        1,
        help="ranks that compute every step together: processes of this host, each with a share of the heads, the MLP "
        "and --num-threads, over one KV memory",
    )
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
        require_at_least_1(
            self, "block_size", "max_num_seqs", "num_threads", "tensor_parallel_size"
        )
        self._require_threads()
        self.check_ledger()

    def _require_threads(self) -> None:
        if self.num_threads < self.tensor_parallel_size:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} needs as many --num-threads, not "
                f"{self.num_threads}: each rank computes in threads of its own"
            )

    @property
    def threads_per_rank(self) -> int:
        return self.num_threads // self.tensor_parallel_size

    @property
    def can_switch_role(self) -> bool:
        """Whether the worker serves `RoleSwitch`."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """How much KV a replica has, and the longest sequence that it takes."""

    layout: KvLayout  # of the whole model
    dtype: str  # that the model is computed in
    num_blocks: int  # the same at all stages
    max_model_len: int
    stage: Stage
    paging: Paging | None = None  # of elastic memory

    @property
    def own_layout(self) -> KvLayout:
        """Of what lies in the replica's own memory."""
        return self.layout.of_layers(len(self.stage.layers))


def plan_pool(
    config: ReplicaConfig, model: ModelConfig, *, rank: int = 0, num_stages: int = 1
) -> PoolPlan:
    """Of one of a pipeline's stages, each of which has the configured memory. Raises ConfigError when the memory does
    not hold one sequence of the length that was asked for, or the model has fewer layers than there are stages."""
    layout = model.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    stages = split(model.num_layers, num_stages)
    block_bytes = max(layout.of_layers(len(stage.layers)).block_bytes for stage in stages)
    num_blocks = config.kv_cache_memory // block_bytes
    paging: Paging | None = None
    if config.is_elastic:
        if num_stages > 1:
            raise ConfigError("elastic KV memory does not go with --pipeline-parallel-size above 1")
        paging = Paging.within(layout, config.kv_cache_memory)
        num_blocks = paging.num_blocks
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} holds no block of {block_bytes} bytes"
        )
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size)
    return PoolPlan(
        layout=layout,
        dtype=model.resolve_dtype(config.dtype),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        stage=stages[rank],
        paging=paging,
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
    elasticity: Elasticity | None = None  # None: its memory is there for good

    @property
    def blanks(self) -> Blanks | None:
        """For the pool over its memory; None: all blocks are there."""
        return None if self.elasticity is None else self.elasticity.blanks

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


class FileMemory(ElasticMemory, Protocol):
    """Memory with a descriptor that other ranks can map."""

    @property
    def fd(self) -> int: ...


class Memory(Protocol):
    """Where a replica's KV lies: a segment of the transfer engine."""

    @property
    def buffer(self) -> memoryview: ...
    @property
    def memory(self) -> FileMemory | None: ...


M = TypeVar("M", bound=Memory)


@contextlib.asynccontextmanager
async def loaded_replica(
    config: ReplicaConfig,
    allocate: Callable[..., M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
) -> AsyncIterator[tuple[Replica, M]]:
    """As `load_replica`; its engine's thread and the ranks behind it end with the block. When a rank is lost,
    `lifecycle` is told to stop, and PeerLost raised at the block's end."""
    async with _other_ranks(config, lifecycle) as others:
        replica, memory = await load_replica(
            config, allocate, lifecycle, rank=rank, num_stages=num_stages, others=others
        )
        with contextlib.closing(replica.thread):
            try:
                yield replica, memory
            finally:
                if replica.elasticity is not None:
                    replica.elasticity.close()


@contextlib.asynccontextmanager
async def _other_ranks(
    config: ReplicaConfig, lifecycle: Lifecycle
) -> AsyncIterator[RankProcesses | None]:
    if config.tensor_parallel_size == 1:
        yield None
        return
    from engine.tensor_parallel.processes import other_ranks  # imports torch

    async with other_ranks(config, lifecycle) as others:
        yield others


async def load_replica(
    config: ReplicaConfig,
    allocate: Callable[..., M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
    others: RankProcesses | None = None,
) -> tuple[Replica, M]:
    """The replica, or one stage of a pipeline of several, and the memory that it had `allocate` make for its KV. Of a
    pipeline the first stage's speed is measured, which is the pace of all. `others`: the ranks behind this one, where
    there are more. Raises ConfigError."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = load_model_config(path)
    plan = plan_pool(config, model, rank=rank, num_stages=num_stages)
    lifecycle.progress("allocating memory")
    memory = await asyncio.to_thread(_allocate, allocate, plan, is_shared=others is not None)
    team = None
    if others is not None:
        assert memory.memory is not None
        team = await others.start(model, num_blocks=plan.num_blocks, pool_fd=memory.memory.fd)
    thread = await asyncio.to_thread(
        _load, path, model, config, plan, memory.buffer, lifecycle.progress, team
    )
    if others is not None:
        await others.join(thread.engine)
    profiles = conductor_pb2.PrefillProfile(), conductor_pb2.DecodeProfile()
    if plan.stage.is_first:
        lifecycle.progress("measuring")
        profiles = await thread.run(lambda: _measure(thread.engine, config))
    elasticity: Elasticity | None = None
    if plan.paging is not None and memory.memory is not None:
        elasticity = config.elasticity(config.instance_id, plan.paging, memory.memory)
    replica = Replica(
        config=config, plan=plan, thread=thread, profiles=profiles, elasticity=elasticity
    )
    return replica, memory


def _allocate(allocate: Callable[..., M], plan: PoolPlan, *, is_shared: bool) -> M:
    """`is_shared`: other ranks map it, which sealed memory does not allow."""
    nbytes = plan.own_layout.pool_bytes(plan.num_blocks)
    try:
        if plan.paging is None and not is_shared:
            return allocate(nbytes)
        memory = allocate(nbytes, elastic=True, name="kv")
        if plan.paging is None and memory.memory is not None:
            memory.memory.populate(0, nbytes)
        return memory
    except (OSError, MemoryError) as error:
        raise ConfigError(f"{nbytes} bytes of KV: {error}; lower --kv-cache-memory") from error


def _load(
    path: Path,
    model: ModelConfig,
    config: ReplicaConfig,
    plan: PoolPlan,
    memory: memoryview,
    progress: Callable[[str, float], None],
    team: Team | None,
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
        team=team,
        dtype=plan.dtype,
        num_threads=config.threads_per_rank,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        cache_folder=cache_folder_of(config),
        progress=progress,
    )
    return EngineThread(engine)


def _measure(engine: Engine, config: ReplicaConfig) -> Profiles:
    """How fast this engine is, for the conductor's predictions. Overwrites the pool."""
    from engine.profile import measure_cached

    folder = cache_folder_of(config) / "profiles"
    return measure_cached(engine, folder, chunk_tokens=config.max_num_batched_tokens)


def cache_folder_of(config: ReplicaConfig) -> Path:
    """Where compiled kernels and measured speeds are kept."""
    return Path(config.cache_dir) if config.cache_dir else cache_folder(os.environ, Path.home())
