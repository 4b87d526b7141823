"""Which layers of a model an engine has: all of them, or the share of one stage of a pipeline.

A group of workers that prefill each prompt together cuts the model into contiguous runs of layers (chunked pipeline
parallelism, Mooncake FAST'25 §4.2): the first stage embeds, the last has the final norm and the head, and hidden states
go from each to the next. Only the numbers; knows neither weights nor who computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
