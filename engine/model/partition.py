"""Partition of a model: the layers of a pipeline stage, and the heads and widths of a tensor-parallel rank.

A *stage* has a contiguous range of layers (chunked pipeline parallelism, Mooncake FAST'25 §4.2). The first stage has
the embedding, the last one the final norm and the head; hidden states go from each stage to the next.

A *shard* is a part of every layer. Query, key, value, gate and up projections are cut by columns, output and down
projections by rows, so a layer needs two sums over all ranks (Megatron-LM, arXiv:1909.08053 §3). The head is cut by
vocabulary. Every rank has the whole embedding, of which a step reads only a few rows.

Only numbers: knows neither weights nor kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from moonserve.engine.model.config import ModelConfig
from moonserve.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of `size` pipeline stages; `rank` counts from 0."""

    rank: int
    size: int
    layers: range  # of the model

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def stages_of_lengths(counts: Sequence[int]) -> tuple[Stage, ...]:
    """Returns stages with the given numbers of layers. Raises ConfigError if one of them is 0."""
    if min(counts) < 1:
        raise ConfigError(f"every stage of a pipeline has at least one layer, not {list(counts)}")
    ends = list(accumulate(counts))
    return tuple(
        Stage(rank=rank, size=len(counts), layers=range(end - count, end))
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def split_into_stages(num_layers: int, size: int) -> tuple[Stage, ...]:
    """Returns `size` stages that differ by at most one layer. Larger stages come first, since the last one also has the
    head. Raises ConfigError if there are more stages than layers."""
    if not 1 <= size <= num_layers:
        raise ConfigError(f"{num_layers} layers cannot be divided into {size} pipeline stages")
    least, more = divmod(num_layers, size)
    return stages_of_lengths([least + (rank < more) for rank in range(size)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Share of one of `size` tensor-parallel ranks; `rank` counts from 0. Ranges are contiguous parts of the model."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    inner: range  # of the MLP
    vocabulary: range  # of the head; the last ranks may have fewer tokens, or none

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def shard_config(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration of this rank's share as a model; its vocabulary is the rank's part of the head."""
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.vocabulary),
        )


def split_into_shards(config: ModelConfig, size: int) -> tuple[Shard, ...]:
    """Returns the shards of all ranks. Raises ConfigError if the model cannot be cut into `size` equal parts. A KV head
    and the query heads that share it stay together; otherwise two ranks would have to write its KV."""
    for what, count in (
        ("num_key_value_heads", config.num_kv_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if count % size:
            raise ConfigError(f"--tensor-parallel-size {size} does not divide the model's {what} of {count}")
    return tuple(_shard(config, rank, size) for rank in range(size))


def _shard(config: ModelConfig, rank: int, size: int) -> Shard:
    def part(count: int) -> range:
        share = -(-count // size)
        return range(min(rank * share, count), min((rank + 1) * share, count))

    return Shard(
        rank=rank,
        size=size,
        heads=part(config.num_heads),
        kv_heads=part(config.num_kv_heads),
        inner=part(config.intermediate_size),
        vocabulary=part(config.vocab_size),
    )
