"""Products with packed weights equal torch's, and the result for a row does not depend on the other rows."""

import ctypes
import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.engine.kernels.weight_packing import (
    LANES,
    Arena,
    Compact,
    Compactor,
    Matrix,
    pack,
    pack_gates,
    packed_bytes,
)
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES
from tests.engine.kernels.calls import DTYPES, compiled_library, library, random_tensor
from tests.thoroughness import examples

CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18  # as in tile_product.h: the system may refuse the matrix unit
HAS_MATRIX_UNIT = "amx_bf16" in CPU_FLAGS and ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA) == 0


def product(matrix: Matrix, x: torch.Tensor, outputs: int, processor: str = "native") -> torch.Tensor:
    """Multiplies x [rows, in], whose rows need not be contiguous."""
    out = torch.full((len(x) + 1, outputs), 7.0, dtype=x.dtype)
    structure = matrix.structure()
    library(x.dtype, processor).product(
        ctypes.addressof(structure), x.data_ptr(), x.stride(0), len(x), out.data_ptr(), outputs
    )
    assert (out[-1] == 7).all()  # nothing is written beyond the end
    return out[:-1]


def gate(matrix: Matrix, x: torch.Tensor, inner: int) -> torch.Tensor:
    width = -(-inner // LANES) * LANES
    out = torch.empty(len(x), width, dtype=x.dtype)
    structure = matrix.structure()
    library(x.dtype).gate(ctypes.addressof(structure), x.data_ptr(), x.stride(0), len(x), out.data_ptr())
    return out[:, :inner]


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    return pack(weight, bias, Arena(packed_bytes([weight])))


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = F.linear(x.double(), weight.double())
    return product if bias is None else product + bias.double()


def assert_exact(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Requires the accuracy of float32 sums in any order, rounded once to the dtype: each of n + 1 float32 additions
    has an error of at most half a unit of the sum of all magnitudes."""
    expected = exact(x, weight, bias)
    once = 0.0 if found.dtype == torch.float32 else 2.0**-8
    magnitude = exact(x.abs(), weight.abs(), None if bias is None else bias.abs())
    bound = once * expected.abs() + 2.0**-24 * (x.shape[1] + 2) * magnitude
    off = ((found.double() - expected).abs() - bound).max()
    assert off <= 0, f"off by {off:.1e} more than rounding explains"


LONG = {"gap": 0, "with_bias": False, "seed": 0}


@example(dtype=torch.float32, rows=1, outputs=64, pairs=4096, **LONG)
@example(dtype=torch.bfloat16, rows=9, outputs=33, pairs=4096, **LONG)
@example(dtype=torch.bfloat16, rows=16, outputs=4096, pairs=32, **LONG)
@example(dtype=torch.bfloat16, rows=300, outputs=300, pairs=2065, **LONG)
@settings(max_examples=examples(80), deadline=None)
@given(
    dtype=DTYPES,
    rows=st.integers(1, 70),
    outputs=st.integers(1, 200),
    pairs=st.integers(1, 150),
    gap=st.integers(0, 3),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_product_is_the_exact_result_rounded(
    dtype: torch.dtype, rows: int, outputs: int, pairs: int, gap: int, with_bias: bool, seed: int
) -> None:
    """Covers any number of rows and outputs, and input rows with gaps and any alignment."""
    inputs = 2 * pairs
    wide = random_tensor(seed, rows, inputs + gap, dtype=dtype)
    weight = random_tensor(seed + 1, outputs, inputs, dtype=dtype) / inputs**0.5
    bias = random_tensor(seed + 2, outputs, dtype=dtype) if with_bias else None
    x = wide[:, gap:]
    assert_exact(product(packed(weight, bias), x, outputs), x, weight, bias)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize(
    ("processor", "needed"), [("x86-64", "sse2"), ("x86-64-v3", "avx2"), ("cooperlake", "avx512_bf16")]
)
@pytest.mark.slow
def test_older_processors_give_the_same_products(name: str, processor: str, needed: str) -> None:
    """Covers processors without AVX-512, without any AVX, and without a matrix unit."""
    if needed not in CPU_FLAGS:
        pytest.skip(f"this processor has no {needed}")
    dtype = TORCH_DTYPES[name]
    weight = random_tensor(1, 70, 130, dtype=dtype) / 130**0.5
    bias = random_tensor(2, 70, dtype=dtype)
    matrix = packed(weight, bias)
    for rows in (1, 2, 3, 11):
        x = random_tensor(rows, rows, 130, dtype=dtype)
        assert_exact(product(matrix, x, 70, processor), x, weight, bias)


@pytest.mark.parametrize("inputs", [98, 2 * 2065])
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_row_has_the_same_bits_in_any_batch(name: str, inputs: int) -> None:
    """Covers denormal products, which matrix units take for 0."""
    dtype = TORCH_DTYPES[name]
    x = random_tensor(0, 300, inputs, dtype=dtype) * torch.logspace(0, -38, 300)[:, None].to(dtype)
    matrix = packed(random_tensor(1, 70, inputs, dtype=dtype), None)
    together = product(matrix, x, 70)
    for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 40, 257):
        for first in (100, 300 - count) if count < 200 else (0,):
            assert torch.equal(product(matrix, x[first : first + count], 70), together[first : first + count])


@pytest.mark.skipif(not HAS_MATRIX_UNIT, reason="no matrix unit for bfloat16 (AMX), or the system refuses it")
@pytest.mark.parametrize("compact", [False, True])
def test_matrix_unit_sums_even_and_odd_inputs_apart(compact: bool) -> None:
    """Tells its products from others, which add 1 to 2^40 and lose it."""
    row = torch.zeros(1, 64, dtype=torch.bfloat16)
    row[0, :3] = torch.tensor([2.0**40, 1.0, -(2.0**40)])
    weight = torch.ones(70, 64, dtype=torch.bfloat16)
    matrix = (compacted if compact else packed)(weight, None)
    for rows in (1, 2, 16, 33, 70):
        assert (product(matrix, row.repeat(rows, 1), 70) == 1).all()


def test_silu_is_finite_and_accurate_for_any_input() -> None:
    """Checks the gate function, through a product with the identity."""
    values = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 88.0, 200.0, 1e30])
    x = torch.zeros(len(values), 32)
    x[:, 0], x[:, 16] = values, 1.0
    weight = torch.zeros(32, 32)
    weight[0, 0] = weight[16, 16] = 1.0
    matrix = pack_gates(weight, None, Arena(packed_bytes([weight])))
    torch.testing.assert_close(gate(matrix, x, 16)[:, 0], F.silu(values), rtol=1e-6, atol=1e-35)


def compacted(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    return pack(weight, bias, Arena(packed_bytes([weight]), compactor()))


def compactor() -> Compactor:
    library = compiled_library(torch.bfloat16)
    if not library.reads_compact:
        pytest.skip("this processor has no products of pairs of bfloat16")
    return Compactor(library)


def with_seldom(weight: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Replaces some random elements by values that a normal distribution hardly produces."""
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
def test_compact_weights_give_the_same_product(
    rows: int, outputs: int, cells: int, seldom: int, with_bias: bool, seed: int
) -> None:
    inputs = 4 * cells
    x = random_tensor(seed, rows, inputs, dtype=torch.bfloat16)
    plain = random_tensor(seed + 1, outputs, inputs, dtype=torch.bfloat16) / inputs**0.5
    weight = with_seldom(plain, seldom, seed)
    bias = random_tensor(seed + 2, outputs, dtype=torch.bfloat16) if with_bias else None
    expected = product(packed(weight, bias), x, outputs)
    assert torch.equal(product(compacted(weight, bias), x, outputs), expected)


def test_compact_weights_give_the_same_swiglu() -> None:
    x = random_tensor(0, 11, 96, dtype=torch.bfloat16)
    weight = with_seldom(random_tensor(1, 160, 96, dtype=torch.bfloat16) / 10, 9, 0)
    plain = pack_gates(weight, None, Arena(packed_bytes([weight])))
    compact = pack_gates(weight, None, Arena(packed_bytes([weight]), compactor()))
    assert isinstance(compact.panels, Compact)
    assert torch.equal(gate(compact, x, 80), gate(plain, x, 80))


def test_normal_matrix_is_compacted_to_three_quarters() -> None:
    weight = 0.02 * random_tensor(0, 512, 768, dtype=torch.bfloat16)
    panels = compacted(weight).panels
    assert isinstance(panels, Compact)
    assert panels.cells.nbytes == 0.75 * weight.nbytes
    assert panels.outliers.nbytes < 0.001 * weight.nbytes
    assert panels.starts[-1] == len(panels.outliers)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.ones(32, 70, dtype=torch.bfloat16), id="an odd number of words"),
        pytest.param(torch.exp2(torch.arange(64 * 64) % 40 - 20.0).bfloat16().view(64, 64), id="many exponents"),
        pytest.param(torch.ones(0, 64, dtype=torch.bfloat16), id="nothing"),
    ],
)
def test_matrix_that_does_not_compact_stays_plain(weight: torch.Tensor) -> None:
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
