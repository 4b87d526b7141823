"""Interface of a compute backend: a step's tensors, attention, and layers without attention. Which backend runs:
selector.py; C++: native/, bound by native_library.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moonserve.engine.cuda.streams import to_device
from moonserve.engine.model.config.latents import LatentHeads

# -- attention

Plan = Any
"""A backend's prepared step; opaque to all others."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Head counts and head size of the model, and what a head may attend to besides tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Per layer [heads] float32: logit of each query head of attending to nothing, its attention sink. Empty: no sinks.
    sinks: tuple[torch.Tensor, ...] = ()
    latents: LatentHeads | None = None  # None: heads attend to K and V, not to latents


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of one sequence. Spans lie back to back in the step's tensors."""

    start: int
    end: int
    blocks: npt.NDArray[np.int64]  # block table, at least up to `end`
    prompt_end: int
    """Position of the first output token. A backend may give output tokens the same bits whether they are computed one
    by one or, after a loss, many at once."""


class StepOrder(Protocol):
    """What an engine needs to know of attention to lay out a step."""

    name: str
    reads_whole_blocks: bool
    """True if slots behind a single token in its last block are read and then masked: they must not be NaN."""

    def order(self, lengths: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the order in which this backend needs the spans, given their (start, end)."""


class Attention(StepOrder, Protocol):
    """Causal attention of a step's tokens over their own sequences."""

    def plan(self, spans: Sequence[Span], window: int | None) -> Plan:
        """Prepares a step. A token attends to itself and the window - 1 tokens before it; None = all earlier tokens."""

    def attend(
        self, layer: int, plan: Plan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Computes attention of one layer: queries [tokens, heads, head_dim] → [tokens, heads · head_dim]. This step's
        keys and values [tokens, kv_heads, head_dim] are also in the pool already. Latents: [tokens, heads · rank]."""


def singles_first(lengths: Sequence[tuple[int, int]]) -> list[int]:
    """Returns an order of spans (start, end): single tokens first, then chunks, each by length of context."""

    def rank(index: int) -> tuple[bool, int]:
        start, end = lengths[index]
        return end - start > 1, end

    return sorted(range(len(lengths)), key=rank)


# -- a step's tokens


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """Input tokens of a step that are on the device only."""

    places: torch.Tensor  # [k] int64, on the host: their indices in the step
    tokens: torch.Tensor  # [k] int64, on the device

    def put_into(self, token_ids: torch.Tensor) -> None:
        """Inserts the tokens into `token_ids` of the whole step, on the device."""
        token_ids.index_copy_(0, to_device(self.places, token_ids.device), self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Flat batch of a step's tokens. Sequences lie back to back; only attention knows their boundaries."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    longest: int  # largest position + 1
    slots: torch.Tensor  # [tokens] int64: pool slots to which KV is written
    spans: Sequence[Span]
    rows: torch.Tensor | None  # int64: tokens whose logits are needed; None = all
    device_tokens: DeviceTokens | None = None  # tokens that are on the device only; `token_ids` has 0 in their place
    # [tokens, hidden_size] from the previous pipeline stage; None = embed `token_ids`.
    hidden: torch.Tensor | None = None


# -- layers without attention

Pass = Any
"""State of a step in progress, with its hidden states; opaque to all but the kernels that began it."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]; heads of a token are contiguous.
With latent attention, queries [tokens, heads, pooled] in the latents' space; keys and values are in the pool only."""


class AllReduce(Protocol):
    """Sums of the partial results of a worker's ranks (`engine.tensor_parallel`)."""

    def all_reduce(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Adds all ranks' parts to `hidden`; all are contiguous [tokens, hidden_size]. Raises PeerLost."""


class Kernels(Protocol):
    """Layers of a model over its KV pool, without attention. One pass at a time. Kernels know neither sequences nor
    sampling.

    A layer is two calls with attention between them. An implementation may fuse all operations within a call: at the
    sizes that CPUs serve, dispatching an operation costs as much as computing it. Numerics follow transformers cast for
    cast: the result of each projection, norm and product is rounded to the compute dtype."""

    name: str

    def begin(self, step: Step) -> Pass:
        """Starts a pass: embeds the step's tokens, or copies its hidden states if it has any."""

    def project(self, layer: int, work: Pass) -> Heads:
        """Computes the layer's norm, projections, query and key norms, and rotation, and writes K and V to the pool.
        The returned heads are valid until the next call for this pass."""

    def finish(self, layer: int, work: Pass, attended: torch.Tensor) -> None:
        """Projects attention's result `attended` [tokens, heads · head_dim], adds it to the hidden states, runs the
        MLP. If ranks share the layer, all have their K and V in the pool on return; raises PeerLost if one is lost."""

    def hidden(self, work: Pass) -> torch.Tensor:
        """Returns the current hidden states [tokens, hidden_size] for the next pipeline stage. Valid until the next
        call for this pass."""

    def select_rows(self, work: Pass, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Restricts the pass to the tokens at indices `rows` (int64), in this order, and returns their rows of
        `attended` [tokens, heads · head_dim]. At most once in a pass, between the last `project` and its `finish`."""

    def logits(self, work: Pass) -> torch.Tensor:
        """Returns logits [tokens, vocab] float32, which were rounded to the compute dtype."""
