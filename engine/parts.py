"""Which part of a model an engine has: all of it, one stage of a pipeline, or the share of a tensor-parallel rank.

A *stage* has a contiguous run of layers (chunked pipeline parallelism, Mooncake FAST'25 §4.2): the first one embeds,
the last one has the final norm and the head, and hidden states go from each to the next.

A *shard* is a part of every layer. Queries, keys and values, and the MLP's inner size, are cut by columns, and what
follows them by rows, so that a layer needs two sums over all ranks (Megatron-LM, arXiv:1909.08053 §3). The head is cut
by tokens of the vocabulary; every rank has the embedding, which costs nothing to read.

Only the numbers; knows neither weights nor who computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.config import ModelConfig
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One of `size` stages, the `rank`-th from 0."""

    rank: int
    size: int
    layers: range  # of the model

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def cut(counts: Sequence[int]) -> tuple[Stage, ...]:
    """Stages with so many layers each. Raises ConfigError for one that would have none."""
    if min(counts) < 1:
        raise ConfigError(f"every stage of a pipeline has at least one layer, not {list(counts)}")
    ends = list(accumulate(counts))
    return tuple(
        Stage(rank=rank, size=len(counts), layers=range(end - count, end))
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def split(num_layers: int, size: int) -> tuple[Stage, ...]:
    """`size` stages that differ by one layer at most, the larger ones first: the last one also has the head. Raises
    ConfigError for more stages than layers."""
    if not 1 <= size <= num_layers:
        raise ConfigError(f"{num_layers} layers cannot be shared by {size} pipeline stages")
    least, more = divmod(num_layers, size)
    return cut([least + (rank < more) for rank in range(size)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The `rank`-th of `size`, from 0. Ranges are contiguous parts of the model's."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    inner: range  # of the MLP
    vocabulary: range  # of the head; the last ranks may have fewer, or none

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def of(self, config: ModelConfig) -> ModelConfig:
        """What this rank computes, as if it were a model; its vocabulary is the head's part."""
        return replace(
            config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            vocab_size=len(self.vocabulary),
        )


def shards(config: ModelConfig, size: int) -> tuple[Shard, ...]:
    """All ranks' parts. Raises ConfigError for a model that cannot be cut into so many equal ones: a KV head, and the
    query heads that share it, stay together, since two ranks would have to write its KV otherwise."""
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
