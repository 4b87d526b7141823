"""What both attention kernels do with a tile of tokens: find it in the pool, load it, fold it into a softmax.

Scores are kept in units of log2, since exp2 is what the hardware has; sums are float32.
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
    """Elements from the beginning of a layer's K (or V) to each token, for those that are `seen`; the others are 0."""
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
    """[tokens, HEAD_COLUMNS] of one head; zeros where a token is not seen, whatever lies there, and behind HEAD_DIM."""
    columns = tl.arange(0, HEAD_COLUMNS)
    inside = seen[:, None]
    if HEAD_COLUMNS != HEAD_DIM:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return tl.load(pool + offsets[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def product(left: tl.tensor, right: tl.tensor, added: tl.tensor) -> tl.tensor:
    """left · right + added, in float32; `added`: None = nothing. float32 factors are not rounded to tf32."""
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
    """One step of the online softmax (Milakov & Gimelshein; FlashAttention): the running maximum, sum and weighted
    values of each query row, with these tokens added. `visible`: None = every row sees every token."""
    scores = product(queries, tl.trans(keys), None) * scale
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen nothing yet (a window that begins later): its weights are 0, not exp2(inf - inf).
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    output = product(weights.to(values.dtype), values, output * shrink[:, None])
    return highest, total, output
