"""Forward pass of Llama-type decoders over a flat batch of tokens.

Owns only the order of operations: `engine.kernels.Kernels` computes the layers, `engine.kernels.Attention` reads
earlier tokens.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from moonserve.engine.kernels import Attention, Kernels, Plan, Step
from moonserve.engine.model.config import ModelConfig


class LogitsGather(Protocol):
    """Access of a tensor-parallel rank to the other ranks' logits."""

    def gather_logits(self, own: torch.Tensor) -> torch.Tensor:
        """Joins all ranks' parts of the vocabulary to logits [rows, vocab]. Only rank 0 gets a meaningful result.
        Raises PeerLost."""


class ForwardPass(Protocol):
    """Interface between the engine and a model: `Model`, or a wrapper that replays CUDA graphs."""

    kernels_name: str

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Returns logits `[rows, vocab]`, float32, or hidden states `[tokens, hidden_size]` if the stage is not the
        last one. The result is valid until the next call. `on_layer(l)` runs right after layer l's K and V, of all
        ranks, are in the pool. Raises PeerLost if another rank is lost."""


class Model:
    """A decoder, or a range of its layers: kernels, which own the weights, and attention over one KV pool."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        attention: Attention,
        *,
        gives_logits: bool = True,
        logits_gather: LogitsGather | None = None,
    ) -> None:
        """`gives_logits`: True if the model's last layer is included; otherwise a pass returns hidden states.
        `logits_gather`: for a tensor-parallel rank; None = the layers are whole."""
        self.kernels_name = kernels.name
        self.windows = frozenset(config.sliding_windows)  # distinct windows of the layers
        self._windows = config.sliding_windows
        self._kernels = kernels
        self._attention = attention
        self._last = config.num_layers - 1 if gives_logits else None
        self._vocab_size = config.vocab_size
        self._logits_gather = logits_gather

    def forward(self, step: Step, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Plans attention for the step and runs the pass; see `ForwardPass.forward`."""
        plans = {window: self._attention.plan(step.spans, window) for window in self.windows}
        return self.run(step, plans, on_layer)

    def run(
        self,
        step: Step,
        plans: Mapping[int | None, Plan],
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Runs the pass with an existing attention plan for each window; `step.spans` is not used."""
        work = self._kernels.begin(step)
        for layer, window in enumerate(self._windows):
            queries, keys, values = self._kernels.project(layer, work)
            if on_layer is not None and self._logits_gather is None:
                on_layer(layer)
            wanted = step.rows if layer == self._last else None
            if wanted is not None and not len(wanted) and self._logits_gather is None:
                return self._no_logits(queries)  # only K and V of the last layer are needed
            attended = self._attention.attend(layer, plans[window], queries, keys, values)
            if wanted is not None:
                attended = self._kernels.select_rows(work, self._finished(wanted), attended)
            self._kernels.finish(layer, work, attended)
            if on_layer is not None and self._logits_gather is not None:
                on_layer(layer)
            if wanted is not None and not len(wanted):
                return self._no_logits(queries)
        if self._last is None:
            return self._kernels.hidden(work)
        logits = self._kernels.logits(work)
        return logits if self._logits_gather is None else self._logits_gather.gather_logits(logits)

    def _no_logits(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty((0, self._vocab_size), dtype=torch.float32)

    def _finished(self, wanted: torch.Tensor) -> torch.Tensor:
        """Returns the rows that go through the rest of the last layer: the rows whose logits are needed. With ranks at
        least one row is kept: the layer's sums synchronise them, and so confirm that all have written their K and V."""
        return wanted if len(wanted) or self._logits_gather is None else wanted.new_zeros(1)
