"""Loads and measures one model replica for a worker process, from its options to a running engine thread.

Imports torch only during loading, so that a wrong option is reported at once. Does not know the owner of the memory or
the use that the worker makes of the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.block_pool import Blanks
from engine.config import ModelConfig, load_model_config, resolve_model
from engine.device import CPU, CUDA, resolve_device
from engine.elastic.elasticity import Elasticity
from engine.elastic.elasticity import Memory as ElasticMemory
from engine.pool_plan import PoolPlan, Room, plan_pool
from engine.replica_config import ReplicaConfig, cache_folder_of
from engine.staging import InPlace, Staging, staging_of
from engine.zeroing import BlockMemory
from protocol.errors import ConfigError
from protocol.pb import common_pb2, conductor_pb2
from protocol.process import Lifecycle
from protocol.request import Endpoint
from protocol.wire import endpoint_to_wire, to_message

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.runtime import EngineThread
    from engine.tensor_parallel.processes import RankProcesses
    from engine.tensor_parallel.team import Team

Profiles = tuple[conductor_pb2.PrefillProfile, conductor_pb2.DecodeProfile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A loaded engine in its thread, and its description for the cluster. The user closes the thread."""

    config: ReplicaConfig
    plan: PoolPlan
    thread: EngineThread
    profiles: Profiles
    device: str = CPU  # cpu, cuda or cpu-staged
    elasticity: Elasticity | None = None  # None: fixed memory
    staging: Staging = field(default_factory=InPlace)  # between the replica's memory and the engine's

    @property
    def blanks(self) -> Blanks | None:
        """Free list for the block pool over the replica's memory; None if the memory is fixed."""
        return None if self.elasticity is None else self.elasticity.blanks

    def zeroing(self, memory: memoryview) -> BlockMemory | None:
        """Returns the zeroing function for the pool over `memory`, or None without `--zero-kv-blocks`."""
        if not self.config.zero_kv_blocks:
            return None
        return BlockMemory(memory, self.plan.own_layout, self.plan.num_blocks)

    @property
    def fingerprint(self) -> str:
        return self.thread.engine.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.thread.engine.config.vocab_size

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


class FileMemory(ElasticMemory, Protocol):
    """Elastic memory with a descriptor that other ranks can map."""

    @property
    def fd(self) -> int: ...


class Memory(Protocol):
    """Memory of a replica's KV: a segment of the transfer engine."""

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
    """Loads a replica like `load_replica`, and stops its engine thread and other ranks at the end of the block. If a
    rank is lost, `lifecycle` is stopped and PeerLost is raised at the end of the block."""
    async with _other_ranks(config, lifecycle) as others:
        replica, memory = await load_replica(
            config, allocate, lifecycle, rank=rank, num_stages=num_stages, others=others
        )
        with contextlib.closing(replica.thread):
            try:
                yield replica, memory
            finally:
                replica.staging.close()
                if replica.elasticity is not None:
                    replica.elasticity.close()


@contextlib.asynccontextmanager
async def _other_ranks(config: ReplicaConfig, lifecycle: Lifecycle) -> AsyncIterator[RankProcesses | None]:
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
    """Loads a replica, or one stage of a pipeline, and returns it with its KV memory, which `allocate` creates. Only
    the first stage of a pipeline is measured: its speed stands for all. `others`: the other ranks of the worker, if
    there are any. Raises ConfigError."""
    lifecycle.progress("reading configuration")
    path = await asyncio.to_thread(resolve_model, config.model)
    model = load_model_config(path)
    device = await asyncio.to_thread(_device, config)
    room = await asyncio.to_thread(_room, config, model, device)
    plan = plan_pool(config, model, rank=rank, num_stages=num_stages, room=room)
    lifecycle.progress("allocating memory")
    memory = await asyncio.to_thread(_allocate, allocate, plan, is_shared=others is not None)
    team = None
    if others is not None:
        assert memory.memory is not None
        team = await others.start(model, num_blocks=plan.num_blocks, pool_fd=memory.memory.fd)
    thread = await asyncio.to_thread(_load, path, model, config, plan, device, memory.buffer, lifecycle.progress, team)
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
        config=config,
        plan=plan,
        thread=thread,
        profiles=profiles,
        device=device,
        elasticity=elasticity,
        staging=await asyncio.to_thread(staging_of, thread.engine),
    )
    return replica, memory


def _device(config: ReplicaConfig) -> str:
    device = resolve_device(config.device)
    if device == CUDA:
        config.require_device(device)
    return device


def _room(config: ReplicaConfig, model: ModelConfig, device: str) -> Room:
    if device != CUDA or config.kv_cache_memory is not None:
        return Room.wished(config)
    from engine.cuda.room import room_on_gpu  # imports torch

    return room_on_gpu(config, model)


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
    team: Team | None,
) -> EngineThread:
    # Imported here and below so that a wrong option is reported before torch is imported.
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
        device=device,
        num_threads=config.threads_per_rank,
        kernels=config.kernels,
        attention=config.kernels,
        load_format=config.load_format,
        cache_folder=cache_folder_of(config),
        progress=progress,
    )
    return EngineThread(engine)


def _measure(engine: Engine, config: ReplicaConfig) -> Profiles:
    """Measures the engine's speed for the conductor's predictions. Overwrites the pool."""
    from engine.profile import measure_cached

    folder = cache_folder_of(config) / "profiles"
    return measure_cached(engine, folder, chunk_tokens=config.max_num_batched_tokens)
