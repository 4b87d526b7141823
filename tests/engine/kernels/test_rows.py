"""Quantised heads in C++ are torch's, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_pool import CODES, quantise
from tests.engine.kernels.calls import DTYPES, library, random_tensor
from tests.thoroughness import examples


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
