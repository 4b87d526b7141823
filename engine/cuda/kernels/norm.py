"""RMSNorm, with the addition to the residual stream that comes before it: one pass over memory for both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_norm(
    hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """RMSNorm of hidden + added, times weight [size]; hidden [rows, size] becomes the sum. `added`: None = nothing.

    The norm is computed in float32 and rounded to the compute dtype before the weight is applied, as in transformers.
    All tensors are contiguous."""
    rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    columns = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        hidden, added, weight, normed, epsilon,
        SIZE=size, COLUMNS=columns, num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip
    return normed


@triton.jit
def _add_norm(
    hidden: tl.tensor, added: tl.tensor, weight: tl.tensor, normed: tl.tensor, epsilon: tl.tensor,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    places = tl.arange(0, COLUMNS)
    inside = places < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + places
    values = tl.load(hidden + row, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + row, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(hidden.dtype.element_ty)
        tl.store(hidden + row, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    result = (values * scale).to(normed.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row, (result * weights).to(normed.dtype.element_ty), mask=inside)
