"""Interface between the forward pass and the kernels, which compute a decoder without its attention.

A layer is two calls with attention between them. An implementation may fuse all operations within a call: at the sizes
that CPUs serve, dispatching an operation costs as much as computing it. Numerics follow transformers cast for cast: the
result of each projection, norm and product is rounded to the compute dtype. Kernels know neither sequences nor
sampling.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.step import Step

Pass = Any
"""State of a step in progress, with its hidden states; opaque to all but the kernels that began it."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]; heads of a token are contiguous."""


class Sums(Protocol):
    """Sums of the partial results of a worker's ranks (`engine.tensor_parallel`)."""

    def add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds all ranks' parts to `hidden`; all are contiguous [tokens, hidden_size]. Raises PeerLost."""


class Kernels(Protocol):
    """Layers of a model over its KV pool. One pass at a time."""

    name: str

    def begin(self, step: Step) -> Pass:
        """Starts a pass: embeds the step's tokens, or copies its hidden states if it has any."""

    def project(self, layer: int, work: Pass) -> Heads:
        """Computes the layer's norm, projections, query and key norms, and rotation, and writes K and V to the pool.
        The returned heads are valid until the next call for this pass."""

    def finish(self, layer: int, work: Pass, seen: torch.Tensor) -> None:
        """Projects attention's result `seen` [tokens, heads · head_dim], adds it to the hidden states, runs the MLP. If
        ranks share the layer, all have their K and V in the pool on return; raises PeerLost if one is lost."""

    def hidden(self, work: Pass) -> torch.Tensor:
        """Returns the current hidden states [tokens, hidden_size] for the next pipeline stage. Valid until the next
        call for this pass."""

    def keep(self, work: Pass, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Restricts the pass to the tokens at indices `rows` (int64), in this order, and returns their rows of `seen`
        [tokens, heads · head_dim]. At most once in a pass, between the last `project` and its `finish`."""

    def logits(self, work: Pass) -> torch.Tensor:
        """Returns logits [tokens, vocab] float32, which were rounded to the compute dtype."""
