"""The forward pass of the Llama lineage over a flat batch of tokens.

Only the order of things: what computes a layer is `engine.kernels`, what looks at earlier tokens is `engine.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from engine.attention.base import Attention, Plan
from engine.config import ModelConfig
from engine.kernels.base import Kernels
from engine.step import Step


class ForwardPass(Protocol):
    """What an engine runs: `Model`, or one that replays it."""

    kernels_name: str

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32, until the next call; of a stage that is not the last one hidden states
        `[tokens, hidden_size]`. `on_layer(l)` runs right after layer l's K and V are in the pool."""


class Model:
    """A decoder, or a run of its layers: its kernels, which have the weights and the KV pool, and its attention."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: Attention,
        *,
        gives_logits: bool = True,
    ) -> None:
        """`gives_logits`: whether the last layer is among them; otherwise a pass gives hidden states."""
        self.kernels_name = kernels.name
        self.windows = frozenset(config.sliding_windows)  # that any layer has
        self._windows = config.sliding_windows
        self._kernels = kernels
        self._attention = attention
        self._last = config.num_layers - 1 if gives_logits else None
        self._vocab_size = config.vocab_size

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """As `ForwardPass.forward`."""
        plans = {window: self._attention.plan(step.spans, window) for window in self.windows}
        return self.run(step, plans, on_layer)

    def run(
        self,
        step: Step,
        plans: Mapping[int | None, Plan],
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """As `forward`, with a plan for each window that was made before; `step.spans` is not looked at."""
        work = self._kernels.begin(step)
        for layer, window in enumerate(self._windows):
            queries, keys, values = self._kernels.project(layer, work)
            if on_layer is not None:
                on_layer(layer)
            wanted = step.rows if layer == self._last else None
            if wanted is not None and not len(wanted):  # here only K and V are ever looked at
                return queries.new_empty((0, self._vocab_size), dtype=torch.float32)
            seen = self._attention.attend(layer, plans[window], queries, keys, values)
            if wanted is not None:
                seen = self._kernels.keep(work, wanted, seen)
            self._kernels.finish(layer, work, seen)
        return self._kernels.hidden(work) if self._last is None else self._kernels.logits(work)
