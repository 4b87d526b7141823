"""The forward pass of the Llama lineage over a flat batch of tokens.

Only the order of things: what computes a layer is `engine.kernels`, what looks at earlier tokens is `engine.attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.base import Attention
from engine.config import ModelConfig
from engine.kernels.base import Kernels
from engine.step import Step


class Model:
    """A decoder: its kernels, which have the weights and the KV pool, and its attention."""

    def __init__(self, config: ModelConfig, kernels: Kernels, attention: Attention) -> None:
        self.kernels_name = kernels.name
        self._windows = config.sliding_windows
        self._kernels = kernels
        self._attention = attention

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32. `on_layer(l)` runs right after layer l's K and V are in the pool."""
        work = self._kernels.begin(step)
        plans = {window: self._attention.plan(step.spans, window) for window in set(self._windows)}
        for layer, window in enumerate(self._windows):
            queries, keys, values = self._kernels.project(layer, work)
            if on_layer is not None:
                on_layer(layer)
            seen = self._attention.attend(layer, plans[window], queries, keys, values)
            self._kernels.finish(layer, work, seen)
        return self._kernels.logits(work, step.rows)
