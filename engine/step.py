"""Input of the forward pass: the tokens of one step as tensors. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import Span
from engine.drawn import Fed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Flat batch of a step's tokens. Sequences lie back to back; only attention knows their boundaries."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    longest: int  # largest position + 1
    slots: torch.Tensor  # [tokens] int64: pool slots to which KV is written
    spans: Sequence[Span]
    rows: torch.Tensor | None  # int64: tokens whose logits are needed; None = all
    fed: Fed | None = None  # tokens that are on the device only; `token_ids` has 0 in their place
    # [tokens, hidden_size] from the previous pipeline stage; None = embed `token_ids`.
    hidden: torch.Tensor | None = None
