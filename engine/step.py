"""One step's tokens as tensors: what the engine gives to the forward pass. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import Span
from engine.drawn import Fed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All sequences of a step lie back to back; only attention knows where one ends."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    longest: int  # one more than the largest position
    slots: torch.Tensor  # [tokens] int64: where their KV goes
    spans: Sequence[Span]
    rows: torch.Tensor | None  # int64, tokens whose logits are wanted; None = all of them
    fed: Fed | None = None  # tokens that only the device knows; `token_ids` has 0 there
    # [tokens, hidden_size] that an earlier stage computed; None = `token_ids` are embedded.
    hidden: torch.Tensor | None = None
