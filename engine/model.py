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


class Share(Protocol):
    """A rank's share of a model, and the others'."""

    def whole_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] from all ranks' parts of the vocabulary; at ranks but the first one nothing of use.
        Raises PeerLost."""


class ForwardPass(Protocol):
    """What an engine runs: `Model`, or one that replays it."""

    kernels_name: str

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[rows, vocab]`, float32, until the next call; of a stage that is not the last one hidden states
        `[tokens, hidden_size]`. `on_layer(l)` runs right after layer l's K and V are in the pool, all ranks' of them.
        Raises PeerLost where another rank is lost."""


class Model:
    """A decoder, or a run of its layers: its kernels, which have the weights and the KV pool, and its attention."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: Attention,
        *,
        gives_logits: bool = True,
        share: Share | None = None,
    ) -> None:
        """`gives_logits`: whether the last layer is among them; otherwise a pass gives hidden states. `share`: of a
        rank; None = the layers are whole."""
        self.kernels_name = kernels.name
        self.windows = frozenset(config.sliding_windows)  # that any layer has
        self._windows = config.sliding_windows
        self._kernels = kernels
        self._attention = attention
        self._last = config.num_layers - 1 if gives_logits else None
        self._vocab_size = config.vocab_size
        self._share = share

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
            if on_layer is not None and self._share is None:
                on_layer(layer)
            wanted = step.rows if layer == self._last else None
            if wanted is not None and not len(wanted) and self._share is None:
                return self._no_logits(queries)  # of the last layer only K and V are ever looked at
            seen = self._attention.attend(layer, plans[window], queries, keys, values)
            if wanted is not None:
                seen = self._kernels.keep(work, self._finished(wanted), seen)
            self._kernels.finish(layer, work, seen)
            if on_layer is not None and self._share is not None:
                on_layer(layer)
            if wanted is not None and not len(wanted):
                return self._no_logits(queries)
        if self._last is None:
            return self._kernels.hidden(work)
        logits = self._kernels.logits(work)
        return logits if self._share is None else self._share.whole_logits(logits)

    def _no_logits(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((0, self._vocab_size), dtype=torch.float32)

    def _finished(self, wanted: torch.Tensor) -> torch.Tensor:
        """Rows that go through the last layer: those whose logits are wanted. Ranks meet in its sums, and know by that
        that all have written their K and V, so that they take one along where nobody wants any."""
        return wanted if len(wanted) or self._share is None else wanted.new_zeros(1)
