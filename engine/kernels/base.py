"""The seam between the forward pass and whoever computes it: all of a decoder but attention.

A layer is two calls with attention between them, since at the sizes that CPUs serve, dispatching an operation costs as
much as computing it: an implementation may fuse whatever lies within a call. Numerics follow transformers, cast for
cast: what a projection, a norm or a product of the model gives is rounded to the compute dtype. An implementation knows
neither sequences nor sampling.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.step import Step

Pass = Any
"""A step on its way through the layers, hidden states included; only the kernels that began it look inside."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]; heads of a token are contiguous."""


class Sums(Protocol):
    """Of what ranks of a worker have computed with their shares of a weight (`engine.tensor_parallel`)."""

    def add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds all ranks' parts to `hidden`, all [tokens, hidden_size] and contiguous. Raises PeerLost."""


class Kernels(Protocol):
    """A model's weights with its KV pool, ready to compute. One pass at a time."""

    name: str

    def begin(self, step: Step) -> Pass:
        """Embeds the step's tokens, unless it brings hidden states, which are copied."""

    def project(self, layer: int, work: Pass) -> Heads:
        """Layer's norm, projections, norms of queries and keys, and rotation. When it returns, K and V are in the pool.
        The heads hold until the next call for this pass."""

    def finish(self, layer: int, work: Pass, seen: torch.Tensor) -> None:
        """What attention saw, [tokens, heads · head_dim], projected and added to the hidden states, then the MLP. Where
        ranks share the layer, all have their K and V in the pool when it returns. Raises PeerLost then."""

    def hidden(self, work: Pass) -> torch.Tensor:
        """[tokens, hidden_size] after the layers so far, for the next stage; until the pass goes on."""

    def keep(self, work: Pass, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Only the tokens `rows` (int64, their places) go on to `finish` and `logits`, in that order. Gives their rows
        of `seen` [tokens, heads · head_dim]. Once in a pass, between the last `project` and its `finish`."""

    def logits(self, work: Pass) -> torch.Tensor:
        """[tokens, vocab] float32, rounded to the compute dtype before."""
