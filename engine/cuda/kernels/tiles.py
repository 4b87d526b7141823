"""Tile operations of both attention kernels: locate tokens in the pool, load them, fold them into a softmax.

Scores are in units of log2, since the hardware computes exp2; sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def token_offsets(
    positions: tl.tensor,
    seen: tl.tensor,
    table: tl.tensor,
    token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns offsets in elements from the beginning of a layer's K (or V) to each token; tokens that are not `seen`
    are looked up in block 0."""
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * token_stride


@triton.jit
def load_tokens(
    pool: tl.tensor,
    offsets: tl.tensor,
    seen: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Loads [tokens, HEAD_COLUMNS] of one head; zeros for tokens that are not `seen` and columns behind HEAD_DIM."""
    columns = tl.arange(0, HEAD_COLUMNS)
    inside = seen[:, None]
    if HEAD_COLUMNS != HEAD_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(pool + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Returns left · right + added (None = nothing) in float32. float32 factors are not rounded to tf32."""
    if INTERPRETED:  # the interpreter multiplies the bits of bfloat16 as if they were integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, acc=added, input_precision="ieee")


@triton.jit
def fold(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
) -> tl.tensor:
    """Adds tokens to an online softmax (Milakov & Gimelshein; FlashAttention) and returns the running maximum, sum and
    weighted values of each query row. `visible`: None = every row attends to every token."""
    scores = product(queries, tl.trans(keys), None) * scale
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row without any token yet (its window begins later) gets weights of 0 instead of exp2(inf - inf).
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    output = product(weights.to(values.dtype), values, output * shrink[:, None])
    return highest, total, output
