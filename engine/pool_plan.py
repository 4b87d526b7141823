"""Plans a replica's KV pool: layout, number of blocks and longest sequence for the available memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig
from engine.elastic.pages import Paging
from engine.parts import Stage, split
from engine.replica_config import DEFAULT_KV_BYTES, ReplicaConfig
from protocol.errors import ConfigError
from protocol.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Size and layout of a replica's KV pool, and the longest sequence that the replica accepts."""

    layout: KvLayout  # of the whole model
    dtype: str  # compute dtype
    num_blocks: int  # equal at all stages
    max_model_len: int
    stage: Stage
    paging: Paging | None = None  # None: fixed memory

    @property
    def own_layout(self) -> KvLayout:
        """Layout of the KV in the replica's own memory: the layers of its stage."""
        return self.layout.of_layers(len(self.stage.layers))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory available for KV, and the option that determines it, for error messages."""

    nbytes: int
    option: str

    @classmethod
    def wished(cls, config: ReplicaConfig) -> Room:
        """Returns the configured size, or the default if none is configured."""
        nbytes = config.kv_cache_memory
        nbytes = DEFAULT_KV_BYTES if nbytes is None else nbytes
        return cls(nbytes, f"--kv-cache-memory {nbytes}")


def plan_pool(
    config: ReplicaConfig,
    model: ModelConfig,
    *,
    rank: int = 0,
    num_stages: int = 1,
    room: Room | None = None,
) -> PoolPlan:
    """Plans the pool of one pipeline stage; each stage has the configured memory. `room`: memory found on the machine,
    in place of the configured size. Raises ConfigError if the memory does not hold a sequence of the requested length,
    or the model has fewer layers than there are stages."""
    room = room or Room.wished(config)
    layout = model.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    stages = split(model.num_layers, num_stages)
    block_bytes = max(layout.of_layers(len(stage.layers)).block_bytes for stage in stages)
    num_blocks = room.nbytes // block_bytes
    paging: Paging | None = None
    if config.is_elastic:
        if num_stages > 1:
            raise ConfigError("elastic KV memory does not go with --pipeline-parallel-size above 1")
        paging = Paging.within(layout, room.nbytes)
        num_blocks = paging.num_blocks
    if num_blocks < 1:
        raise ConfigError(f"{room.option} holds no block of {block_bytes} bytes")
    max_model_len = _max_model_len(config, model, num_blocks * config.block_size, room)
    return PoolPlan(
        layout=layout,
        dtype=model.resolve_dtype(config.dtype),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        stage=stages[rank],
        paging=paging,
    )


def _max_model_len(config: ReplicaConfig, model: ModelConfig, pool_tokens: int, room: Room) -> int:
    wish = config.max_model_len
    if wish is None:
        return min(model.max_position_embeddings, pool_tokens)
    if wish > model.max_position_embeddings:
        raise ConfigError(f"--max-model-len {wish} exceeds the model's {model.max_position_embeddings} positions")
    if wish > pool_tokens:
        raise ConfigError(f"--max-model-len {wish} exceeds the {pool_tokens} tokens that {room.option} holds")
    return wish
