"""The Triton kernels compute what the definition of attention and the torch operations of
`engine.kernels.torch_layers` compute, for any shape, and write nothing else."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from benchmarks.gpu_check.attention_cases import TOLERANCES, AttentionCase, AttentionInputs, relative_error
from moonserve.engine.cuda.attention import TritonAttention
from moonserve.engine.cuda.layer_kernels import Positions, add_norm, rotate_and_store, swiglu
from moonserve.engine.kernels import Geometry
from moonserve.engine.kernels.rope import apply_rope
from moonserve.protocol.errors import ConfigError
from tests.engine.cuda.conftest import DEVICE
from tests.engine.kernels.calls import random_tensor
from tests.thoroughness import examples

MIXED = ((0, 1), (15, 16), (16, 17), (299, 300), (10, 35), (0, 20), (40, 42))


def attend(inputs: AttentionInputs) -> torch.Tensor:
    backend = TritonAttention(inputs.case.geometry, inputs.pool)
    plan = backend.plan(inputs.spans, inputs.case.window)
    unused = inputs.queries.new_empty(0)  # the K and V of this step are already in the pool
    return backend.attend(0, plan, inputs.queries, unused, unused)


def check(case: AttentionCase, device: torch.device) -> None:
    inputs = case.build(device)
    assert relative_error(attend(inputs), inputs.expected()) < TOLERANCES[case.dtype]


CHUNK = ((40, 41), (5, 30))
LONG = ((255, 256), (256, 257), (1000, 1001), (8999, 9000))
"""Contexts of several parts: split at 256 and 512 tokens, or into longer parts above 32 · 256 tokens."""
CASES = [
    *(AttentionCase(spans=MIXED, dtype=d, window=w) for d in TOLERANCES for w in (None, 20)),
    *(AttentionCase(spans=CHUNK, head_dim=size) for size in (16, 24, 80, 128, 256)),
    *(
        AttentionCase(spans=CHUNK, heads=heads, kv_heads=kv_heads, head_dim=16)
        for heads, kv_heads in ((1, 1), (7, 1), (8, 8), (28, 4), (40, 1))
    ),
    *(AttentionCase(spans=((520, 521), (490, 530)), block_size=size) for size in (16, 48, 512)),
    *(AttentionCase(spans=LONG, head_dim=16, heads=2, kv_heads=1, window=w) for w in (None, 700)),
    AttentionCase(spans=((70, 71), (50, 80), (33, 34)), shared_blocks=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_shape_equals_dense_attention(case: AttentionCase, device: torch.device) -> None:
    check(case, device)


@hypothesis_settings(max_examples=examples(8))
@given(
    case=st.builds(
        lambda lengths, heads, **others: AttentionCase(
            spans=tuple((start, start + length) for length, start in sorted(lengths, key=lambda pair: pair[0] > 1)),
            **dict(zip(("heads", "kv_heads"), heads, strict=True)),
            **others,
        ),
        lengths=st.lists(st.tuples(st.just(1) | st.integers(1, 60), st.integers(0, 150)), min_size=1, max_size=4),
        heads=st.sampled_from([(2, 1), (3, 3), (6, 2)]),
        head_dim=st.sampled_from([8, 32, 40]),
        block_size=st.sampled_from([16, 17, 64]),
        window=st.none() | st.integers(1, 100),
        dtype=st.sampled_from(list(TOLERANCES)),
        seed=st.integers(0, 1000),
    )
)
def test_any_step_equals_dense_attention(case: AttentionCase) -> None:
    check(case, DEVICE)


def test_sequence_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    """The result does not depend on the batch, since the split of a context depends on its sequence alone."""
    case = AttentionCase(spans=((600, 601), (30, 31), (2000, 2001), (7, 29)), head_dim=16)
    inputs = case.build(device)
    together = attend(inputs)
    counts = [end - start for start, end in case.spans]
    for span, queries, found in zip(inputs.spans, inputs.queries.split(counts), together.split(counts), strict=True):
        assert torch.equal(attend(AttentionInputs(case, [span], queries, inputs.pool)), found)


def test_too_large_heads_are_refused(device: torch.device) -> None:
    pool = AttentionCase(spans=((0, 1),)).build(device).pool
    with pytest.raises(ConfigError, match="256"):
        TritonAttention(Geometry(4, 2, 512), pool)


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPSILON = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return random_tensor(seed, *shape, dtype=dtype).to(DEVICE)


def check_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares tensors as a whole: sums of products of both signs may cancel, and the interpreter truncates bfloat16
    where a GPU rounds."""
    assert relative_error(found, expected) < TOLERANCES[found.dtype]


def rms_norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(values, (values.shape[-1],), None, EPSILON) * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 96), (3, 2049)])
def test_add_norm_equals_torch(rows: int, size: int, dtype: torch.dtype) -> None:
    hidden, added = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    total = hidden + added
    check_alike(add_norm(hidden, None, weight, EPSILON), rms_norm(hidden, weight))
    check_alike(add_norm(hidden, added, weight, EPSILON), rms_norm(total, weight))
    check_alike(hidden, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(1, 96), (3, 1025)])
def test_swiglu_equals_torch(rows: int, inner: int, dtype: torch.dtype) -> None:
    gate_up = random(rows, 2 * inner, dtype=dtype) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    check_alike(swiglu(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (7, 1, 24), (12, 4, 64), (2, 2, 256)])
def test_rotate_and_store_equals_torch(
    heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """Only the slots of the tokens are written. A slot beyond the end of the pool is ignored."""
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
    check_alike(projected[:, :rotated], expected)
    check_alike(keys, expected_keys)
    assert torch.equal(values, expected_values)
    others = torch.ones(4 * block_size, dtype=torch.bool, device=keys.device)
    others[stored] = False
    assert torch.equal(keys.flatten(0, 1)[others], expected_keys.flatten(0, 1)[others])
