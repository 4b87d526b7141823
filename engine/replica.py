"""Loads and measures one model replica for a worker process, from its options to a running engine thread.

Imports torch only during loading, so that a wrong option is reported at once. Does not know the owner of the memory or
the use that the worker makes of the replica.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from moonserve.engine.config import ReplicaConfig, cache_folder_of
from moonserve.engine.cuda.device import CPU, CUDA, resolve_device
from moonserve.engine.cuda.staging import InPlace, Staging
from moonserve.engine.kv_cache.block_pool import FreeList
from moonserve.engine.kv_cache.elastic_service import ElasticMemory, PageableMemory
from moonserve.engine.kv_cache.pool_size import KvBudget, PoolPlan, gpu_kv_budget, plan_pool
from moonserve.engine.model.config import ModelConfig
from moonserve.engine.model.model_folder import resolve_model
from moonserve.engine.model.transformers_config import read_config
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.pb import common_pb2, conductor_pb2
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.wire import endpoint_to_wire, from_message, to_message
from moonserve.protocol.step_time import DecodeProfile, PrefillProfile

if TYPE_CHECKING:
    from moonserve.engine.engine import Engine, EngineThread
    from moonserve.engine.kernels.shared_cores import SharedCores
    from moonserve.engine.kv_cache.tensors import BlockZeroer
    from moonserve.engine.tensor_parallel import RankGroup
    from moonserve.engine.tensor_parallel.rank_processes import RankProcesses

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A loaded engine in its thread, and its description for the cluster. The user closes the thread."""

    config: ReplicaConfig
    plan: PoolPlan
    thread: "EngineThread"
    profiles: Profiles
    device: str = CPU  # cpu, cuda or cpu-staged
    elastic_memory: ElasticMemory | None = None  # None: fixed memory
    staging: Staging = field(default_factory=InPlace)  # between the replica's memory and the engine's

    @property
    def free_list(self) -> FreeList | None:
        """Free list for the block pool over the replica's memory; None if the memory is fixed."""
        return None if self.elastic_memory is None else self.elastic_memory.free_list

    def make_block_zeroer(self, memory: memoryview) -> "BlockZeroer | None":
        """Returns the zeroing function for the pool over `memory`, or None without `--zero-kv-blocks`."""
        if not self.config.zero_kv_blocks:
            return None
        from moonserve.engine.kv_cache.tensors import BlockZeroer  # imports torch

        return BlockZeroer(memory, self.plan.own_layout, self.plan.num_blocks)

    @property
    def fingerprint(self) -> str:
        return self.thread.engine.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.thread.engine.config.vocab_size

    @property
    def step_costs(self) -> tuple[PrefillProfile, DecodeProfile]:
        """The profiles, from which the worker itself predicts times."""
        prefill, decode = self.profiles
        return from_message(PrefillProfile, prefill), from_message(DecodeProfile, decode)

    def registration(self, endpoint: Endpoint, role: common_pb2.Role.ValueType) -> conductor_pb2.RegisterRequest:
        """Returns the message with which a worker registers with the conductor."""
        prefill, decode = self.profiles
        return conductor_pb2.RegisterRequest(
            endpoint=endpoint_to_wire(endpoint),
            role=role,
            layout=to_message(common_pb2.KvLayout, self.plan.layout),
            fingerprint=self.fingerprint,
            num_blocks=self.plan.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.plan.max_model_len,
            prefill_profile=prefill,
            decode_profile=decode,
            can_switch_role=self.config.can_switch_role,
        )


class FileMemory(PageableMemory, Protocol):
    """Elastic memory with a descriptor that other ranks can map."""

    @property
    def fd(self) -> int: ...


class KvSegment(Protocol):
    """Memory of a replica's KV: a segment of the transfer engine."""

    @property
    def buffer(self) -> memoryview: ...
    @property
    def memory(self) -> FileMemory | None: ...


M = TypeVar("M", bound=KvSegment)


@contextlib.asynccontextmanager
async def running_replica(
    config: ReplicaConfig,
    allocate: Callable[..., M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
) -> AsyncIterator[tuple[Replica, M]]:
    """Loads a replica like `load_replica`, and stops its engine thread and other ranks at the end of the block. If a
    rank is lost, `lifecycle` is stopped and PeerLost is raised at the end of the block."""
    async with contextlib.AsyncExitStack() as parts:
        others = None
        if config.tensor_parallel_size > 1:
            from moonserve.engine.tensor_parallel.rank_processes import other_ranks  # imports torch

            others = await parts.enter_async_context(other_ranks(config, lifecycle))
        replica, memory = await load_replica(
            config, allocate, lifecycle, rank=rank, num_stages=num_stages, others=others
        )
        parts.callback(replica.thread.close)
        if replica.elastic_memory is not None:
            parts.callback(replica.elastic_memory.close)
        parts.callback(replica.staging.close)
        yield replica, memory


async def load_replica(
    config: ReplicaConfig,
    allocate: Callable[..., M],
    lifecycle: Lifecycle,
    *,
    rank: int = 0,
    num_stages: int = 1,
    others: "RankProcesses | None" = None,
) -> tuple[Replica, M]:
    """Loads a replica, or one stage of a pipeline, and returns it with its KV memory, which `allocate` creates. Only
    the first stage of a pipeline is measured: its speed stands for all. `others`: the other ranks of the worker, if
    there are any. Raises ConfigError."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = read_config(path)
    device = await asyncio.to_thread(_device, config)
    budget = await asyncio.to_thread(_kv_budget, config, model, device)
    plan = plan_pool(config, model, rank=rank, num_stages=num_stages, budget=budget)
    lifecycle.progress("allocating memory")
    memory = await asyncio.to_thread(_allocate, allocate, plan, is_shared=others is not None)
    rank_group = None
    if others is not None:
        assert memory.memory is not None
        rank_group = await others.start(model, num_blocks=plan.num_blocks, pool_fd=memory.memory.fd)
    thread = await asyncio.to_thread(
        _load, path, model, config, plan, device, memory.buffer, lifecycle.progress, rank_group
    )
    if others is not None:
        await others.join(thread.engine)
    from moonserve.engine.engine import staging_of  # imports torch, like `_load`

    profiles = conductor_pb2.PrefillProfile(), conductor_pb2.DecodeProfile()
    if plan.stage.is_first:
        lifecycle.progress("measuring")
        profiles = await thread.run(lambda: _measure(thread.engine, config))
    elastic_memory: ElasticMemory | None = None
    if plan.paging is not None and memory.memory is not None:
        elastic_memory = config.make_elastic_memory(config.instance_id, plan.paging, memory.memory)
    replica = Replica(
        config=config,
        plan=plan,
        thread=thread,
        profiles=profiles,
        device=device,
        elastic_memory=elastic_memory,
        staging=await asyncio.to_thread(staging_of, thread.engine),
    )
    return replica, memory


def _device(config: ReplicaConfig) -> str:
    device = resolve_device(config.device)
    if device == CUDA:
        config.require_device(device)
    return device


def _kv_budget(config: ReplicaConfig, model: ModelConfig, device: str) -> KvBudget:
    if device != CUDA or config.kv_cache_memory is not None:
        return KvBudget.from_config(config)
    return gpu_kv_budget(config, model)


def _allocate(allocate: Callable[..., M], plan: PoolPlan, *, is_shared: bool) -> M:
    """Allocates the KV memory. `is_shared`: other ranks map it, which sealed memory does not allow."""
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
    device: str,
    memory: memoryview,
    progress: Callable[[str, float], None],
    rank_group: "RankGroup | None",
) -> "EngineThread":
    # Imported here and below so that a wrong option is reported before torch is imported.
    from moonserve.engine.engine import Engine, EngineThread

    engine = Engine.load(
        path,
        config=model,
        layout=plan.layout,
        num_blocks=plan.num_blocks,
        memory=memory,
        stage=plan.stage,
        rank_group=rank_group,
        dtype=plan.dtype,
        device=device,
        num_threads=config.threads_per_rank,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        quantise=config.quantize,
        cache_folder=cache_folder_of(config),
        progress=progress,
        shared_cores=_shared_cores(config),
    )
    return EngineThread(engine)


def _shared_cores(config: ReplicaConfig) -> "SharedCores | None":
    from moonserve.engine.kernels.shared_cores import SharedCores

    if config.shared_cores is None:
        return None
    try:
        return SharedCores(config.shared_cores, config.num_threads)
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).warning("no cores of other workers are used: %s", error)
        return None


def _measure(engine: "Engine", config: ReplicaConfig) -> Profiles:
    """Measures the engine's speed for the conductor's predictions. Overwrites the pool."""
    from moonserve.engine.speed_profile import measure_cached

    folder = cache_folder_of(config) / "profiles"
    return measure_cached(engine, folder, chunk_tokens=config.max_num_batched_tokens)
