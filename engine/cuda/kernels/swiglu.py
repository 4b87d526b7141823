"""silu(gate) · up of the fused projection, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 · inner], contiguous, gate first → [rows, inner]. silu is rounded to the compute dtype before
    the product, as in transformers."""
    rows, width = gate_up.shape
    inner = width // 2
    output = gate_up.new_empty((rows, inner))
    _swiglu[(rows, triton.cdiv(inner, _TILE))](
        gate_up, output, INNER=inner, TILE=_TILE, num_warps=4
    )
    return output


@triton.jit
def _swiglu(gate_up: tl.tensor, output: tl.tensor, INNER: tl.constexpr, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = places < INNER
    gate = tl.load(gate_up + row * (2 * INNER) + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + places, mask=inside, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(output.dtype.element_ty).to(tl.float32)
    product = silu * up.to(tl.float32)
    tl.store(output + row * INNER + places, product.to(output.dtype.element_ty), mask=inside)
