"""Two sets of kernels, each for the steps that it is fast at: one for few tokens, the other for many.

For processors whose matrix units a library knows to use and our own products do not. The weights lie twice then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.base import Heads, Kernels, Pass
from engine.step import Step

FEW_TOKENS = 16
"""A product of so many rows and fewer takes the time of reading its weights."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    kernels: Kernels
    work: Pass


class MixedKernels:
    """`Kernels` over the same model and the same pool."""

    def __init__(self, few: Kernels, many: Kernels) -> None:
        self.name = f"{few.name}+{many.name}"
        self.few = few
        self.many = many

    def begin(self, step: Step) -> _Chosen:
        kernels = self.few if len(step.token_ids) <= FEW_TOKENS else self.many
        return _Chosen(kernels, kernels.begin(step))

    def project(self, layer: int, work: _Chosen) -> Heads:
        return work.kernels.project(layer, work.work)

    def finish(self, layer: int, work: _Chosen, seen: torch.Tensor) -> None:
        work.kernels.finish(layer, work.work, seen)

    def hidden(self, work: _Chosen) -> torch.Tensor:
        return work.kernels.hidden(work.work)

    def keep(self, work: _Chosen, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return work.kernels.keep(work.work, rows, seen)

    def logits(self, work: _Chosen) -> torch.Tensor:
        return work.kernels.logits(work.work)
