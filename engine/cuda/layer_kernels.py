"""Fused operations between a layer's products, each in one pass over memory: sum and norm; silu(gate) · up; and for
heads before attention their norm (Qwen3), rotation and the writing of K and V to the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


def add_norm(hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Adds `added` (None = nothing) to hidden [rows, size] in place; returns RMSNorm of the sum, times weight [size].

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


_TILE = 1024


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) · up: contiguous gate_up [rows, 2 · inner], gate first → [rows, inner]. silu is rounded to
    the compute dtype before the product, as in transformers."""
    rows, width = gate_up.shape
    inner = width // 2
    output = gate_up.new_empty((rows, inner))
    _swiglu[(rows, triton.cdiv(inner, _TILE))](gate_up, output, INNER=inner, TILE=_TILE, num_warps=4)
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


_HEADS = 8  # per program


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotations and pool slots of a step's tokens."""

    cos: torch.Tensor  # [tokens, head_dim], of each token's position
    signed_sin: torch.Tensor  # sines in the same shape, the first half negated
    # [tokens] int64: block · block_size + position in the block; nothing is stored behind the pool's end.
    slots: torch.Tensor


def rotate_and_store(
    heads: torch.Tensor,
    num_heads: int,
    qk_norm: torch.Tensor | None,
    epsilon: float,
    positions: Positions,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
) -> None:
    """Rotates queries and keys of heads [tokens, num_heads + 2 · kv_heads, head_dim] in place and writes keys and
    values to their slots of a layer's pool, [blocks, block_size, kv_heads, head_dim] each. qk_norm [num_heads +
    kv_heads, head_dim]: RMSNorm over each head before that; None = none. All tensors are contiguous."""
    tokens, all_heads, head_dim = heads.shape
    _rotate_and_store[(tokens, triton.cdiv(all_heads, _HEADS))](
        heads, qk_norm, positions.cos, positions.signed_sin, positions.slots,
        pool_keys, pool_values, pool_keys.shape[0] * pool_keys.shape[1], epsilon,
        QUERY_HEADS=num_heads, KV_HEADS=pool_keys.shape[2], HEAD_DIM=head_dim,
        HALF_COLUMNS=triton.next_power_of_2(head_dim // 2), HEADS=_HEADS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate_and_store(
    heads: tl.tensor, qk_norm: tl.tensor, cos: tl.tensor, signed_sin: tl.tensor, slots: tl.tensor,
    pool_keys: tl.tensor, pool_values: tl.tensor, num_slots: tl.tensor, epsilon: tl.tensor,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_COLUMNS: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTATED: tl.constexpr = QUERY_HEADS + KV_HEADS
    dtype = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_COLUMNS)
    inside = (head < ROTATED + KV_HEADS)[:, None] & (columns < HALF)[None, :]
    places = (token * (ROTATED + KV_HEADS) + head[:, None]) * HEAD_DIM + columns[None, :]
    left_raw = tl.load(heads + places, mask=inside, other=0.0)
    right_raw = tl.load(heads + places + HALF, mask=inside, other=0.0)
    left = left_raw.to(tl.float32)
    right = right_raw.to(tl.float32)
    is_rotated = (head < ROTATED)[:, None] & inside
    if qk_norm is not None:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        weights = head[:, None] * HEAD_DIM + columns[None, :]
        left_weight = tl.load(qk_norm + weights, mask=is_rotated, other=0.0).to(tl.float32)
        right_weight = tl.load(qk_norm + weights + HALF, mask=is_rotated, other=0.0).to(tl.float32)
        left = ((left * scale).to(dtype).to(tl.float32) * left_weight).to(dtype).to(tl.float32)
        right = ((right * scale).to(dtype).to(tl.float32) * right_weight).to(dtype).to(tl.float32)
    angles = token * HEAD_DIM + columns
    within = columns < HALF
    left_cos = tl.load(cos + angles, mask=within, other=0.0).to(tl.float32)[None, :]
    right_cos = tl.load(cos + angles + HALF, mask=within, other=0.0).to(tl.float32)[None, :]
    left_sin = tl.load(signed_sin + angles, mask=within, other=0.0).to(tl.float32)[None, :]
    right_sin = tl.load(signed_sin + angles + HALF, mask=within, other=0.0).to(tl.float32)[None, :]
    # Rounded in between, like the reference.
    new_left = ((left * left_cos).to(dtype).to(tl.float32) + right * left_sin).to(dtype)
    new_right = ((right * right_cos).to(dtype).to(tl.float32) + left * right_sin).to(dtype)
    tl.store(heads + places, new_left, mask=is_rotated)
    tl.store(heads + places + HALF, new_right, mask=is_rotated)
    slot = tl.load(slots + token)
    is_stored = inside & (slot < num_slots)
    slot = slot * KV_HEADS
    is_key = (head >= QUERY_HEADS)[:, None] & is_rotated & is_stored
    key_places = (slot + head[:, None] - QUERY_HEADS) * HEAD_DIM + columns[None, :]
    tl.store(pool_keys + key_places, new_left, mask=is_key)
    tl.store(pool_keys + key_places + HALF, new_right, mask=is_key)
    is_value = (head >= ROTATED)[:, None] & is_stored
    value_places = (slot + head[:, None] - ROTATED) * HEAD_DIM + columns[None, :]
    tl.store(pool_values + value_places, left_raw, mask=is_value)
    tl.store(pool_values + value_places + HALF, right_raw, mask=is_value)
