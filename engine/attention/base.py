"""The seam between the forward pass and attention kernels.

A step's work is planned once and the plan is used by every layer with the same window. A kernel reads K and V of
earlier tokens from the pool, where those of this step already are. It knows neither requests nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Plan = Any
"""What a backend prepared for one step; only it looks inside."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Head counts of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of one sequence; spans lie back to back in the step's tensors."""

    start: int
    end: int
    blocks: npt.NDArray[np.int64]  # block table, at least up to `end`
    prompt_end: int
    """Tokens from here on are output. A backend may see to it that those have the same bits whether they are computed
    one by one or, once lost, many together."""


class Attention(Protocol):
    """Causal attention of a step's tokens over their own sequences."""

    name: str
    reads_whole_blocks: bool
    """Whether what lies behind a single token in its last block is read and then hidden: it must not be NaN."""

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        """The order in which this backend wants the spans, given their (start, end)."""

    def plan(self, spans: Sequence[Span], window: int | None) -> Plan:
        """Prepares a step. A token sees itself and the window - 1 tokens before it; None = all."""

    def attend(
        self,
        layer: int,
        plan: Plan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """queries [tokens, heads, head_dim], this step's keys and values [tokens, kv_heads, head_dim] (also in the
        pool by now) → [tokens, heads · head_dim]."""


def singles_first(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """An order of spans (start, end): single tokens by length, then chunks."""

    def rank(index: int) -> tuple[bool, int]:
        start, end = lengths[index]
        return end - start > 1, end

    return sorted(range(len(lengths)), key=rank)
