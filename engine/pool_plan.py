"""How much KV a replica has, and the longest sequence that it takes: a layout over the memory there is. Pure."""

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


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for KV, and by which option it is what it is."""

    nbytes: int
    option: str

    @classmethod
    def wished(cls, config: ReplicaConfig) -> Room:
        """What the configuration says, or would where it says nothing."""
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
    """Of one of a pipeline's stages, each of which has the configured memory; `room`: where that depends on the
    machine. Raises ConfigError when the memory does not hold one sequence of the length that was asked for, or the
    model has fewer layers than there are stages."""
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
