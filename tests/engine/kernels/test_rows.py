"""RMSNorm and rotation of one row in C++ are torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kv_pool import CODES, quantise
from engine.rope import apply_rope
from tests.engine.kernels.calls import DTYPES, assert_close, library, random_tensor
from tests.thoroughness import examples


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    out, wide = torch.empty_like(x), weight.float()
    library(x.dtype).normalize(x.data_ptr(), wide.data_ptr(), out.data_ptr(), len(x), epsilon)
    return out


@example(dtype=torch.float32, count=8192, seed=0)
@example(dtype=torch.bfloat16, count=8192, seed=0)
@settings(max_examples=examples(60), deadline=None)
@given(dtype=DTYPES, count=st.integers(1, 300), seed=st.integers(0, 99))
def test_a_norm_is_that_of_torch(dtype: torch.dtype, count: int, seed: int) -> None:
    x, weight = random_tensor(seed, count, dtype=dtype), random_tensor(seed + 1, count, dtype=dtype)
    expected = F.rms_norm(x, (count,), None, 1e-5) * weight
    assert_close(norm(x, weight), expected, unit=2)
    x[seed % count] = float("nan")
    assert norm(x, weight).isnan().all(), "no number that looks right"


@settings(max_examples=examples(60), deadline=None)
@given(dtype=DTYPES, half=st.integers(1, 128), seed=st.integers(0, 99))
def test_a_rotation_is_that_of_torch(dtype: torch.dtype, half: int, seed: int) -> None:
    head = random_tensor(seed, 2 * half, dtype=dtype)
    cos, sin = (random_tensor(seed + 1 + part, 2 * half, dtype=dtype) for part in range(2))
    expected = apply_rope(head[None, None], cos[None, None], sin[None, None])[0, 0]
    found = head.clone()
    library(dtype).rotate(found.data_ptr(), cos.data_ptr(), sin.data_ptr(), 2 * half)
    assert_close(found, expected, unit=2)


@settings(max_examples=examples(100), deadline=None)
@given(
    dtype=DTYPES,
    kept=st.sampled_from(["int8", "fp8"]),
    quarter=st.integers(1, 64),
    seed=st.integers(0, 99),
    exponent=st.integers(-40, 40),
)
def test_a_quantised_head_is_that_of_torch_to_the_bit(
    dtype: torch.dtype, kept: str, quarter: int, seed: int, exponent: int
) -> None:
    """Whoever wrote a block, its bytes are the same. Some elements lie on the edge between two codes."""
    head = random_tensor(seed, 4 * quarter, dtype=dtype)
    halves = torch.arange(4 * quarter) % 2 == seed % 2
    head[halves] = (head[halves] * 16).round() / 16
    head *= 2.0**exponent
    head[0] = CODES[kept].highest * 2.0**exponent
    row = torch.full((4 * quarter + 4,), 0xEE, dtype=torch.uint8)
    formats = {"int8": 1, "fp8": 2}
    library(dtype).quantise(head.data_ptr(), row.data_ptr(), len(head), formats[kept])
    assert torch.equal(row, quantise(head, CODES[kept]))


@pytest.mark.parametrize(("kept", "format_"), [("int8", 1), ("fp8", 2)])
def test_every_code_is_that_of_torch(kept: str, format_: int) -> None:
    """All numbers with 12 bits up to the highest code, which are codes and what lies between them."""
    highest = CODES[kept].highest
    steps = torch.arange(0, 4097) / 4096 * highest
    small = torch.arange(0, 64) / 2.0**12
    numbers = torch.cat([steps, small, -steps, -small])
    for part in numbers.split(255):
        head = torch.cat([part, torch.tensor([highest])])
        head = torch.cat([head, torch.zeros(-len(head) % 4)])
        row = torch.empty(len(head) + 4, dtype=torch.uint8)
        library(torch.float32).quantise(head.data_ptr(), row.data_ptr(), len(head), format_)
        assert torch.equal(row, quantise(head, CODES[kept]))
