"""Interface between the forward pass and attention kernels.

A step is planned once per sliding window, and all layers with this window use the plan. A kernel reads K and V of
earlier tokens from the pool, which already contains those of this step. It knows neither requests nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Plan = Any
"""A backend's prepared step; opaque to all others."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Head counts and head size of the model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of one sequence. Spans lie back to back in the step's tensors."""

    start: int
    end: int
    blocks: npt.NDArray[np.int64]  # block table, at least up to `end`
    prompt_end: int
    """Position of the first output token. A backend may give output tokens the same bits whether they are computed one
    by one or, after a loss, many at once."""


class Attention(Protocol):
    """Causal attention of a step's tokens over their own sequences."""

    name: str
    reads_whole_blocks: bool
    """True if slots behind a single token in its last block are read and then masked: they must not be NaN."""

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the order in which this backend needs the spans, given their (start, end)."""

    def plan(self, spans: Sequence[Span], window: int | None) -> Plan:
        """Prepares a step. A token attends to itself and the window - 1 tokens before it; None = all earlier tokens."""

    def attend(
        self,
        layer: int,
        plan: Plan,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Computes attention of one layer: queries [tokens, heads, head_dim] → [tokens, heads · head_dim]. This step's
        keys and values [tokens, kv_heads, head_dim] are also in the pool already."""


def singles_first(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Returns an order of spans (start, end): single tokens first, then chunks, each by length of context."""

    def rank(index: int) -> tuple[bool, int]:
        start, end = lengths[index]
        return end - start > 1, end

    return sorted(range(len(lengths)), key=rank)
