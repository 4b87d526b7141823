"""The fused Triton kernels give what the torch operations of `engine.kernels.torch_kernels` give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from benchmarks.gpu_check.cases import TOLERANCES, relative_error
from engine.cuda.kernels.fused import Positions, add_norm, rotate_and_store, swiglu
from engine.rope import apply_rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As a whole, since sums of products of both signs may cancel; and the interpreter cuts bfloat16 off where a GPU
    rounds."""
    assert relative_error(found, expected) < TOLERANCES[found.dtype]


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(values, (values.shape[-1],), None, EPSILON) * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 96), (3, 2049)])
def test_norm_with_and_without_an_addition(rows: int, size: int, dtype: torch.dtype) -> None:
    hidden, added = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    total = hidden + added
    check(add_norm(hidden, None, weight, EPSILON), rms_norm(hidden, weight))
    check(add_norm(hidden, added, weight, EPSILON), rms_norm(total, weight))
    check(hidden, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (3, 1025)])
def test_swiglu(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * inner, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    check(swiglu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 24), (12, 4, 64), (2, 2, 256)])
def test_rotation_and_what_is_stored(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """Nothing but the tokens' own slots is written, and nothing for a slot behind the pool's end."""
    tokens, block_size, rotated = 5, 16, heads + kv_heads
    projected = random(tokens, rotated + kv_heads, head_dim, dtype=dtype)
    weight = random(rotated, head_dim, dtype=dtype, seed=1) if normed else None
    cos, sin = (random(tokens, 1, head_dim, dtype=dtype, seed=seed) for seed in (2, 3))
    slots = torch.tensor([3, 40, 17, 0, 64], device=projected.device)
    keys, values = (random(4, block_size, kv_heads, head_dim, dtype=dtype, seed=4) for _ in "kv")
    expected_keys, expected_values = keys.clone(), values.clone()
    expected = projected[:, :rotated]
    if weight is not None:
        expected = rms_norm(expected, weight)
    expected = apply_rope(expected, cos, sin)
    stored = slots[:-1]
    expected_keys.flatten(0, 1)[stored] = expected[:-1, heads:]
    expected_values.flatten(0, 1)[stored] = projected[:-1, rotated:]

    rotate_and_store(projected, heads, weight, EPSILON, Positions(cos, sin, slots), keys, values)
    check(projected[:, :rotated], expected)
    check(keys, expected_keys)
    assert torch.equal(values, expected_values)
    others = torch.ones(4 * block_size, dtype=torch.bool, device=keys.device)
    others[stored] = False
    assert torch.equal(keys.flatten(0, 1)[others], expected_keys.flatten(0, 1)[others])
