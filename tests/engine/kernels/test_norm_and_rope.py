"""K and V in one byte per element: the error is bounded, a token's bytes depend on it alone, and C++ equals torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.engine.kv_cache.tensors import QUANTISATIONS, TORCH_DTYPES, KvTensors, dequantise, quantise
from moonserve.protocol.kv_blocks import KvLayout
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
def test_quantised_head_has_the_bits_of_torch(
    dtype: torch.dtype, kept: str, quarter: int, seed: int, exponent: int
) -> None:
    """C++ and torch write the same bytes, also for elements on the boundary between two codes."""
    head = random_tensor(seed, 4 * quarter, dtype=dtype)
    halves = torch.arange(4 * quarter) % 2 == seed % 2
    head[halves] = (head[halves] * 16).round() / 16
    head *= 2.0**exponent
    head[0] = QUANTISATIONS[kept].highest * 2.0**exponent
    row = torch.full((4 * quarter + 4,), 0xEE, dtype=torch.uint8)
    formats = {"int8": 1, "fp8": 2}
    library(dtype).quantise(head.data_ptr(), row.data_ptr(), len(head), formats[kept])
    assert torch.equal(row, quantise(head, QUANTISATIONS[kept]))


@pytest.mark.parametrize(("kept", "format_"), [("int8", 1), ("fp8", 2)])
def test_every_code_equals_that_of_torch(kept: str, format_: int) -> None:
    """Checks all 12-bit numbers up to the highest code: the codes and the values between them."""
    highest = QUANTISATIONS[kept].highest
    steps = torch.arange(0, 4097) / 4096 * highest
    small = torch.arange(0, 64) / 2.0**12
    numbers = torch.cat([steps, small, -steps, -small])
    for part in numbers.split(255):
        head = torch.cat([part, torch.tensor([highest])])
        head = torch.cat([head, torch.zeros(-len(head) % 4)])
        row = torch.empty(len(head) + 4, dtype=torch.uint8)
        library(torch.float32).quantise(head.data_ptr(), row.data_ptr(), len(head), format_)
        assert torch.equal(row, quantise(head, QUANTISATIONS[kept]))


# int8: half a step of the highest magnitude. fp8: half of the last of 3 bits, or half of the least denormal.
RELATIVE = {"int8": 0.0, "fp8": 2.0**-4}
OF_HIGHEST = {"int8": 0.5 / 127, "fp8": 2.0**-10 / 448}


@given(
    name=st.sampled_from(sorted(QUANTISATIONS)), seed=st.integers(0, 1000), exponent=st.integers(-20, 20), dtype=DTYPES
)
def test_quantisation_error_is_at_most_half_a_step(name: str, seed: int, exponent: int, dtype: torch.dtype) -> None:
    heads = random_tensor(seed, 7, 2, 16, dtype=dtype) * 2.0**exponent
    found = dequantise(quantise(heads, QUANTISATIONS[name]), QUANTISATIONS[name], torch.float32)
    wide = heads.float()
    highest = wide.abs().amax(-1, keepdim=True)
    bound = torch.maximum(wide.abs() * RELATIVE[name], highest * OF_HIGHEST[name])
    assert ((found - wide).abs() <= bound * 1.001).all()


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_zeros_and_extreme_magnitudes_are_quantised_correctly(name: str) -> None:
    for value in (0.0, 1e-38, 3e38, -3e38):
        rows = quantise(torch.full((1, 8), value), QUANTISATIONS[name])
        found = dequantise(rows, QUANTISATIONS[name], torch.float32)
        torch.testing.assert_close(found, torch.full((1, 8), value), rtol=1e-6, atol=1e-32)


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_bytes_of_a_token_do_not_depend_on_other_tokens(name: str, dtype: str) -> None:
    """A token's bytes do not depend on the block's earlier content either: nothing is quantised twice."""
    layout = KvLayout(num_layers=1, block_size=8, num_kv_heads=2, head_dim=16, dtype=name)
    keys, values = (3 * random_tensor(seed, 7, 2, 16, dtype=TORCH_DTYPES[dtype]) for seed in (1, 2))
    together, one_by_one = (KvTensors(layout, 3, dtype=dtype) for _ in range(2))
    slots = torch.tensor([9, 8, 14, 10, 11, 12, 13])
    together.write(0, slots, keys, values)
    for token in range(7):
        own = slice(token, token + 1)
        one_by_one.write(0, slots[own], keys[own] * 5, values[own] * 7)
        one_by_one.write(0, slots[own], keys[own], values[own])
    assert bytes(together.memory) == bytes(one_by_one.memory)
    found, _ = together.gather(0, torch.tensor([1]))
    assert found.dtype == TORCH_DTYPES[dtype]
    torch.testing.assert_close(found[0, slots - 8], keys, rtol=0.07, atol=0.07)
