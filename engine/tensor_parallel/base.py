"""The seam between a rank's layers and how ranks reach each other.

All ranks make the same calls in the same order, with the same shapes. Sums are taken in float32 in the order of ranks,
so they are the same bits at every rank, every time and whatever else is in a step.
"""

from __future__ import annotations

from typing import Protocol

import torch

# Longer than any step takes on a machine that could serve; a rank that is stopped must not hold the others for ever.
PATIENCE_S = 60.0


class Ranks(Protocol):
    """The ranks of one worker as one of them sees them. One caller at a time. Every call raises PeerLost when another
    rank has died or has not come within `PATIENCE_S`; nothing works after that."""

    name: str

    def connect(self) -> None:
        """Before the first other call, once all ranks run; returns when all have called it."""

    def add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds the sum of all ranks' parts to `hidden`, which is equal at all of them. Shapes are equal, contiguous."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Rank 0 gets all parts in order, of one shape, contiguous; the others an empty list."""
