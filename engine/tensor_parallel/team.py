"""What an engine knows of the other ranks: its share of the model, how parts become whole, and, at rank 0, how the
others are told each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.shard import Shard
from engine.step import Step
from engine.tensor_parallel.base import Ranks

OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One rank's view."""

    shard: Shard
    ranks: Ranks
    vocab_size: int

    def whole_logits(self, own: torch.Tensor) -> torch.Tensor:
        """As `engine.model.Share.whole_logits`."""
        if not len(own):
            return own.new_empty(0, self.vocab_size)  # nobody samples
        width = -(-self.vocab_size // self.shard.size)
        parts = self.ranks.gather(F.pad(own, (0, width - own.shape[1])).contiguous())
        return torch.cat(parts, dim=1)[:, : self.vocab_size] if parts else own


class Others(Protocol):
    """The ranks that do as rank 0 says."""

    def tell(self, step: Step, dirty: torch.Tensor | None) -> None:
        """The step that all compute next. Raises PeerLost."""

    def give_up(self, error: BaseException) -> None:
        """They are of no use any more: nobody knows what they wait for since `error`. From any thread."""


class Leading:
    """How rank 0 runs a step. Its rule: a step that has been told runs to its end, or the team is given up."""

    def __init__(self, others: Others) -> None:
        self._others = others

    def run(
        self,
        compute: Callable[[Step, torch.Tensor | None, OnLayer | None], torch.Tensor],
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """`compute` at all ranks. Raises what `on_layer` raised, when the step has ended."""
        later = None if on_layer is None else _Later(on_layer)
        try:
            self._others.tell(step, dirty)
            output = compute(step, dirty, later)
        except BaseException as error:
            self._others.give_up(error)
            raise
        if later is not None and later.error is not None:
            raise later.error
        return output


class _Later:
    """Calls `on_layer` until it fails."""

    def __init__(self, on_layer: OnLayer) -> None:
        self._on_layer = on_layer
        self.error: Exception | None = None

    def __call__(self, layer: int) -> None:
        if self.error is None:
            try:
                self._on_layer(layer)
            except (
                Exception
            ) as error:  # the caller's, whoever it is; raised when all ranks have ended the step
                self.error = error
