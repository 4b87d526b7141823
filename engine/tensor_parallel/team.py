"""An engine's view of the other ranks: its share of the model, the joining of parts and, at rank 0, the sending of
steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.parts import Shard
from engine.step import Step
from engine.tensor_parallel.shared import Ranks

OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """One rank's share of the model and its access to the other ranks."""

    shard: Shard
    ranks: Ranks
    vocab_size: int

    def whole_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Implements `engine.model.Share.whole_logits`."""
        if not len(own):
            return own.new_empty(0, self.vocab_size)  # no slice samples
        width = -(-self.vocab_size // self.shard.size)
        parts = self.ranks.gather(F.pad(own, (0, width - own.shape[1])).contiguous())
        return torch.cat(parts, dim=1)[:, : self.vocab_size] if parts else own


class Others(Protocol):
    """The ranks that follow rank 0."""

    def tell(self, step: Step, dirty: torch.Tensor | None) -> None:
        """Sends the step that all ranks compute next. Raises PeerLost."""

    def give_up(self, error: BaseException) -> None:
        """Gives the team up after `error`, since the state of the other ranks is unknown. Callable from any thread."""


class Leading:
    """Runs steps at rank 0. Rule: a step that was sent runs to its end, or the team is given up."""

    def __init__(self, others: Others) -> None:
        self._others = others

    def run(
        self,
        compute: Callable[[Step, torch.Tensor | None, OnLayer | None], torch.Tensor],
        step: Step,
        dirty: torch.Tensor | None,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        """Runs `compute` at all ranks. An exception of `on_layer` is raised after the step has ended."""
        failures: list[Exception] = []

        def guarded(layer: int) -> None:
            if on_layer is not None and not failures:
                try:
                    on_layer(layer)
                except Exception as error:  # the caller's error; raised once the step has ended
                    failures.append(error)

        try:
            self._others.tell(step, dirty)
            output = compute(step, dirty, None if on_layer is None else guarded)
        except BaseException as error:
            self._others.give_up(error)
            raise
        if failures:
            raise failures[0]
        return output
