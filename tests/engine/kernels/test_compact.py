"""Compact weights give the same bits as the weights that they stand for."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.packing import Arena, Compact, Compactor, Matrix, pack, pack_gates, packed_bytes
from tests.engine.kernels.calls import compiled_library, random_tensor
from tests.engine.kernels.test_products import gate, packed, product
from tests.thoroughness import examples


def compacted(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    return pack(weight, bias, Arena(packed_bytes([weight]), compactor()))


def compactor() -> Compactor:
    library = compiled_library(torch.bfloat16)
    if not library.reads_compact:
        pytest.skip("this processor has no products of pairs of bfloat16")
    return Compactor(library)


def with_seldom(weight: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Some elements anywhere become what a normal distribution hardly has."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([0.0, -0.0, 1e-38, -3e-9, 7e4, -1e20], dtype=weight.dtype)
    places = torch.randint(weight.numel(), (count,), generator=generator)
    chosen = values[torch.randint(len(values), (count,), generator=generator)]
    changed = weight.clone()
    changed.view(-1)[places] = chosen
    return changed


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 200),
    cells=st.integers(1, 70),
    seldom=st.integers(0, 12),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_the_same_bits(
    rows: int, outputs: int, cells: int, seldom: int, with_bias: bool, seed: int
) -> None:
    inputs = 4 * cells
    x = random_tensor(seed, rows, inputs, dtype=torch.bfloat16)
    plain = random_tensor(seed + 1, outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    weight = with_seldom(plain, seldom, seed)
    bias = random_tensor(seed + 2, outputs, dtype=torch.bfloat16) if with_bias else None
    expected = product(packed(weight, bias), x, outputs)
    assert torch.equal(product(compacted(weight, bias), x, outputs), expected)


def test_swiglu_is_the_same_bits() -> None:
    x = random_tensor(0, 11, 96, dtype=torch.bfloat16)
    weight = with_seldom(random_tensor(1, 160, 96, dtype=torch.bfloat16) / 10, 9, 0)
    plain = pack_gates(weight, None, Arena(packed_bytes([weight])))
    compact = pack_gates(weight, None, Arena(packed_bytes([weight]), compactor()))
    assert isinstance(compact.panels, Compact)
    assert torch.equal(gate(compact, x, 80), gate(plain, x, 80))


def test_a_normal_matrix_takes_three_quarters() -> None:
    weight = 0.02 * random_tensor(0, 512, 768, dtype=torch.bfloat16)
    panels = compacted(weight).panels
    assert isinstance(panels, Compact)
    assert panels.cells.nbytes == 0.75 * weight.nbytes
    assert panels.seldom.nbytes < 0.001 * weight.nbytes
    assert panels.starts[-1] == len(panels.seldom)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.ones(32, 70, dtype=torch.bfloat16), id="an odd number of words"),
        pytest.param(torch.exp2(torch.arange(64 * 64) % 40 - 20.0).bfloat16().view(64, 64), id="many exponents"),
        pytest.param(torch.ones(0, 64, dtype=torch.bfloat16), id="nothing"),
    ],
)
def test_what_cannot_gain_stays_plain(weight: torch.Tensor) -> None:
    matrix = compacted(weight)
    assert isinstance(matrix.panels, torch.Tensor)
    if len(weight):
        x = random_tensor(0, 3, weight.shape[1], dtype=torch.bfloat16)
        expected = product(packed(weight, None), x, len(weight))
        assert torch.equal(product(matrix, x, len(weight)), expected)


def test_float32_is_not_compact() -> None:
    assert not compiled_library(torch.float32).reads_compact


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.slow
def test_older_processors_read_plain_weights() -> None:
    assert not compiled_library(torch.bfloat16, "x86-64").reads_compact
