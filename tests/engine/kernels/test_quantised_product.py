"""Products with weights of 4 and 8 bits equal those of the weights that they stand for, computed in float64."""

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonserve.engine.kernels.weight_packing import Arena, Matrix, pack, pack_gates
from moonserve.engine.kv_cache.tensors import TORCH_DTYPES
from moonserve.engine.model.weights.quantised_matrix import (
    HugePages,
    QuantisedMatrix,
    QuantisedRows,
    WeightFormat,
    common_format,
    quantise,
    rounded,
)
from moonserve.protocol.errors import ConfigError
from tests.engine.kernels.calls import DTYPES, random_tensor
from tests.engine.kernels.test_matrix_product import gate, product
from tests.thoroughness import examples

GROUPS = (16, 32, 64, 128)
FORMATS = [WeightFormat(bits, group, zeros) for bits in (4, 8) for group in GROUPS for zeros in (False, True)]
FORMATS += [WeightFormat(4, 32, has_mins=True), WeightFormat(8, 16, has_mins=True), WeightFormat(4, 32, is_float=True)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # numbers of MXFP4


def random_rows(seed: int, outputs: int, inputs: int, format: WeightFormat) -> QuantisedRows:
    """Returns rows with any codes, scales of both signs and all magnitudes, and any zero points or minima."""
    generator = torch.Generator().manual_seed(seed)
    lowest, highest = (0, 15) if format.bits == 4 else (-128, 127)
    groups = -(-inputs // format.group)
    codes = torch.randint(lowest, highest + 1, (outputs, inputs), generator=generator)
    zeros = torch.randint(lowest, highest + 2, (outputs, groups), generator=generator)
    scales = torch.randn(outputs, groups, generator=generator) * 10.0 ** torch.randint(
        -6, 1, (outputs, 1), generator=generator
    )
    own = zeros.to(torch.int16) if format.has_zeros else None
    mins = torch.randn(outputs, groups, generator=generator) * scales.abs().amax() * highest
    scales, mins = scales.to(format.scale_dtype), mins.half()
    return QuantisedRows(codes.to(torch.int8), scales, own, format, mins if format.has_mins else None)


def exact_weights(rows: QuantisedRows) -> torch.Tensor:
    implied = 8 if rows.format.bits == 4 and rows.mins is None else 0
    zeros = torch.full_like(rows.scales, implied) if rows.zeros is None else rows.zeros
    columns = torch.arange(rows.codes.shape[1]) // rows.format.group
    if rows.format.is_float:
        return 2 * E2M1.double()[rows.codes.long()] * rows.scales.double()[:, columns]
    return (rows.codes.double() - zeros.double()[:, columns]) * rows.scales.double()[:, columns] - exact_mins(rows)


def exact_mins(rows: QuantisedRows) -> torch.Tensor:
    mins = torch.zeros_like(rows.scales) if rows.mins is None else rows.mins
    return mins.double().repeat_interleave(rows.format.group, 1)[:, : rows.codes.shape[1]]


def matrix_of(rows: QuantisedRows, *, pairs: bool = False) -> QuantisedMatrix:
    """Stores the rows in two parts, as the rows of fused projections are."""
    outputs, inputs = rows.shape
    matrix = QuantisedMatrix(outputs, inputs, rows.format, HugePages(1 << 16), pairs=pairs)
    cut = outputs // 2
    for first, part in ((0, slice(0, cut)), (cut, slice(cut, outputs))):
        matrix.store(first, rows.part(part, slice(None)))
    return matrix


def packed(rows: QuantisedRows, bias: torch.Tensor | None = None) -> Matrix:
    return pack(matrix_of(rows), bias, Arena(0))


def exact_product(x: torch.Tensor, rows: QuantisedRows, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the product and the error of float32: half a code of 16 bits of a group's highest magnitude for inputs,
    three roundings per group and as many for its minimum."""
    weights, wide = exact_weights(rows), x.double()
    group, groups = rows.format.group, rows.scales.shape[1]
    highest = F.pad(wide.abs(), (0, groups * group - x.shape[1])).view(len(x), groups, group).amax(-1)
    half_codes = highest.repeat_interleave(group, 1)[:, : x.shape[1]] / 32639 * 0.501
    magnitude = wide.abs() @ (weights.abs() + 4 * exact_mins(rows).abs()).T + added.abs()
    off = half_codes @ weights.abs().T + 2.0**-24 * (3 * groups + 4) * magnitude
    return wide @ weights.T + added, off * 1.001


def assert_exact(found: torch.Tensor, x: torch.Tensor, rows: QuantisedRows, bias: torch.Tensor | None = None) -> None:
    """Requires the exact product up to rounding in float32, and one rounding to the dtype."""
    expected, bound = exact_product(x, rows, torch.zeros(rows.shape[0]) if bias is None else bias)
    once = 0.0 if found.dtype == torch.float32 else 2.0**-8
    off = ((found.double() - expected).abs() - once * expected.abs() * 1.001 - (1 + once) * bound).max()
    assert off <= 1e-37, f"off by {off:.1e} more than rounding explains"


@example(dtype=torch.bfloat16, format=WeightFormat(8, 128, True), rows=70, outputs=33, inputs=1030, gap=1, seed=0)
@example(dtype=torch.float32, format=WeightFormat(4, 32), rows=1, outputs=200, inputs=4096, gap=0, seed=0)
@settings(max_examples=examples(120), deadline=None)
@given(
    dtype=DTYPES,
    format=st.sampled_from(FORMATS),
    rows=st.integers(1, 40),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 300),
    gap=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_product_is_that_of_the_weights_the_codes_stand_for(
    dtype: torch.dtype, format: WeightFormat, rows: int, outputs: int, inputs: int, gap: int, seed: int
) -> None:
    """Covers sizes that groups do not divide, and rows of input with gaps and very different magnitudes."""
    x = random_tensor(seed, rows, inputs + gap, dtype=dtype)[:, gap:]
    x[:, ::7] *= 1000
    x[:, : inputs // 2] /= 1000
    own = random_rows(seed, outputs, inputs, format)
    bias = random_tensor(seed, outputs, dtype=dtype) if seed % 2 else None
    assert_exact(product(packed(own, bias), x, outputs), x, own, bias)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_row_has_the_same_bits_in_any_batch(format: WeightFormat, dtype: torch.dtype) -> None:
    x = random_tensor(0, 130, 290, dtype=dtype)
    matrix = packed(random_rows(1, 70, 290, format))
    together = product(matrix, x, 70)
    for count in (1, 2, 3, 4, 7, 8, 9, 15, 33, 65):
        assert torch.equal(product(matrix, x[130 - count :], 70), together[130 - count :])


@pytest.mark.parametrize("format", [WeightFormat(4, 32), WeightFormat(8, 64, True)], ids=str)
def test_gates_multiply_their_ups(format: WeightFormat) -> None:
    """The inner size is no multiple of a panel's 16 pairs."""
    x, rows = random_tensor(0, 5, 64, dtype=torch.float32), random_rows(1, 2 * 41, 64, format)
    found = gate(pack_gates(matrix_of(rows, pairs=True), None, Arena(0)), x, 41)
    (gates, ups), (gates_off, ups_off) = (each.chunk(2, 1) for each in exact_product(x, rows, torch.zeros(2 * 41)))
    exact = F.silu(gates) * ups
    off = 1.1 * gates_off * (ups.abs() + ups_off) + F.silu(gates).abs() * ups_off  # silu's slope is below 1.1
    assert ((found.double() - exact).abs() <= off + 1e-5 * exact.abs()).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_input_that_is_not_finite_gives_no_finite_output(value: float) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = value
    found = product(packed(random_rows(0, 8, 64, WeightFormat(4, 32))), x, 8)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
@pytest.mark.slow
def test_older_processors_give_the_same_products(processor: str) -> None:
    if processor == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    for format in FORMATS:
        own = random_rows(1, 70, 130, format)
        for count in (1, 2, 3, 11):
            x = random_tensor(count, count, 130, dtype=torch.bfloat16)
            assert_exact(product(packed(own), x, 70, processor), x, own)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_rounded_to_the_nearest_code(bits: int) -> None:
    """A weight is off by at most half a step, except near the end of the scale that has no code of 4 bits: one step."""
    weights = random_tensor(0, 9, 100, dtype=torch.float32)
    weights[3, :32] = 0.0
    rows = quantise(weights, WeightFormat(bits, 32))
    steps = (exact_weights(rows) - weights).abs() / rows.scales.abs().double().repeat_interleave(32, 1)[:, :100]
    assert rows.codes.min() >= (0 if bits == 4 else -128)
    assert rows.codes.max() <= (15 if bits == 4 else 127)
    assert float(steps.nan_to_num().max()) <= (1.01 if bits == 4 else 0.51)
    assert float((steps > 0.501).double().mean()) < 0.02
    assert torch.equal(rounded(weights, rows.format), rows.dequantised())
    assert torch.equal(rows.dequantised().double(), exact_weights(rows))


def test_weights_that_have_no_scale_are_refused() -> None:
    for value in (float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigError, match="cannot be quantised"):
            quantise(torch.full((1, 32), value), WeightFormat(4, 32))


def test_groups_are_not_cut() -> None:
    rows = random_rows(0, 4, 96, WeightFormat(8, 32, True))
    part = rows.part(slice(1, 3), slice(32, 96))
    assert torch.equal(exact_weights(part), exact_weights(rows)[1:3, 32:])
    with pytest.raises(ConfigError, match="groups of 32 weights cannot be cut"):
        rows.part(slice(None), slice(16, 96))


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_common_format_holds_the_same_weights(format: WeightFormat) -> None:
    rows, common = random_rows(0, 5, 130, format), common_format([format, WeightFormat(8, 16)])
    fits = not format.is_float and (format.bits == 4 or not format.has_zeros)
    assert (common is not None) == fits, "other zero points and floats do not fit"
    assert common is None or torch.equal(exact_weights(rows.in_format(common)), exact_weights(rows))
