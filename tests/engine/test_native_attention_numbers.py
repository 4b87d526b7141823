"""The native kernels' numbers: those of dense attention, whatever the shape, and the same bits however work is cut.

Every pool is NaN wherever no token may look (`Case`), so each of these tests also finds a read too far.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.attention import Attention, make_attention
from engine.attention import native as native_attention
from engine.attention.native import pieces_of
from engine.kernels.compiling import FLAGS, load_kernels
from tests.engine.attention_cases import Case
from tests.thoroughness import examples

DTYPES = ["float32", "bfloat16"]
KEPT = [None, "int8", "fp8"]  # what the pool is quantised to
# Single tokens of all kinds of lengths, whole prompts, and chunks behind cached tokens.
MIXED = [(0, 1), (15, 16), (16, 17), (599, 600), (0, 2), (0, 17), (0, 130), (70, 75), (100, 301)]


def backend(case: Case, kernels: Path) -> Attention:
    return make_attention("native", case.geometry, case.pool, kernels)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 1, 20, 64, 200])
def test_a_mixed_step_equals_dense_attention(
    dtype: str, kept: str | None, window: int | None, kernels: Path
) -> None:
    case = Case(lengths=MIXED, dtype=dtype, kept=kept, window=window)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("kept", ["int8", "fp8"])
@pytest.mark.parametrize("head_dim", [4, 20, 40, 128, 256])
def test_any_head_size_of_a_quantised_pool(kept: str, head_dim: int, kernels: Path) -> None:
    case = Case(lengths=MIXED, dtype="bfloat16", kept=kept, head_dim=head_dim)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 7, 16, 40, 80, 96, 128, 256])
def test_any_head_size_up_to_the_limit(dtype: str, head_dim: int, kernels: Path) -> None:
    case = Case(lengths=MIXED, dtype=dtype, head_dim=head_dim)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16, 64])
def test_any_number_of_queries_per_kv_head(dtype: str, group: int, kernels: Path) -> None:
    case = Case(lengths=MIXED, dtype=dtype, group=group, head_dim=16)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("block_size", [1, 8, 32, 100, 256, 512])
def test_any_block_size(dtype: str, kept: str | None, block_size: int, kernels: Path) -> None:
    case = Case(lengths=MIXED, dtype=dtype, kept=kept, block_size=block_size, window=150)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 4_000])
def test_eight_thousand_tokens(dtype: str, window: int | None, kernels: Path) -> None:
    case = Case(
        lengths=[(8_191, 8_192), (8_100, 8_192)], dtype=dtype, kv_heads=1, group=2, window=window
    )
    case.check(case.attend(backend(case, kernels)))


def test_sequences_share_blocks(kernels: Path) -> None:
    case = Case(lengths=[(99, 100), (64, 90), (130, 131), (80, 200)], num_shared=64)
    assert len({int(span.blocks[0]) for span in case.spans}) == 1
    case.check(case.attend(backend(case, kernels)))


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    case=st.builds(
        Case,
        lengths=st.lists(
            st.tuples(st.integers(0, 400), st.one_of(st.just(1), st.integers(1, 150))).map(
                lambda pair: (pair[0], pair[0] + pair[1])
            ),
            min_size=1,
            max_size=5,
        ),
        dtype=st.sampled_from(DTYPES),
        kept=st.sampled_from(KEPT),
        kv_heads=st.integers(1, 4),
        group=st.integers(1, 8),
        head_dim=st.sampled_from([8, 24, 32, 64, 72, 128]),
        block_size=st.sampled_from([1, 16, 24, 32, 64]),
        window=st.one_of(st.none(), st.integers(1, 300)),
        seed=st.integers(0, 1_000),
    )
)
def test_any_step_equals_dense_attention(case: Case, kernels: Path) -> None:
    found = backend(case, kernels)
    case.check(case.attend(found))
    assert torch.equal(case.attend(found), case.attend_alone(found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 100])
def test_threads_do_not_change_a_bit(
    dtype: str, kept: str | None, window: int | None, kernels: Path
) -> None:
    """Nor does what else is in the step."""
    case = Case(lengths=[*MIXED, (4_999, 5_000)], dtype=dtype, kept=kept, window=window)
    found = []
    for count in (1, 2):
        with threads(count):
            kernel = backend(case, kernels)
        found += [case.attend(kernel), case.attend_alone(kernel)]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("window", [None, 1, 50, 90])
def test_how_a_prompt_is_cut_does_not_change_a_bit(
    dtype: str, kept: str | None, window: int | None, kernels: Path
) -> None:
    """For the same K and V, that is."""
    cuts = [(0, 300), (0, 37), (37, 38), (38, 235), (235, 300)]
    case = Case(lengths=cuts, dtype=dtype, kept=kept, window=window, num_shared=0)
    slots = case.pool.num_blocks * case.block_size
    heads = torch.randn(2, slots, case.kv_heads, case.head_dim).to(case.queries.dtype)
    case.pool.write(0, torch.arange(slots), *heads)
    case.spans = [replace(s, blocks=case.spans[0].blocks, prompt_end=300) for s in case.spans]
    case.queries = torch.cat([case.queries[:300], case.queries[:300]])
    found = case.attend(backend(case, kernels))
    assert torch.equal(found[:300], found[300:])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiler flags of x86-64")
@pytest.mark.parametrize(
    ("flag", "dtype", "kept"),
    [
        *itertools.product(["-mno-avx512f", "-march=x86-64"], DTYPES, [None]),
        ("-mno-avx512f", "bfloat16", "int8"),
        ("-march=x86-64", "float32", "fp8"),
    ],
)
def test_processors_without_avx512_compute_the_same(
    flag: str, dtype: str, kept: str | None, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_older(
        source: Path, folder: Path | None, *, flags: Sequence[str] = FLAGS
    ) -> ctypes.CDLL:
        return load_kernels(source, folder, flags=(*flags, flag))

    monkeypatch.setattr(native_attention, "load_kernels", load_older)
    case = Case(lengths=MIXED, dtype=dtype, kept=kept, head_dim=40, window=100)
    case.check(case.attend(backend(case, kernels)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_neither_overflow_nor_vanish(dtype: str, kernels: Path) -> None:
    """Weights thousands of powers of two apart still add up to one."""
    case = Case(lengths=[(199, 200), (0, 100)], dtype=dtype, window=70)
    case.queries = case.queries * 3_000
    values = case.pool.values[0]
    values[~values.isnan()] = 1.0
    found = case.attend(backend(case, kernels))
    torch.testing.assert_close(found, torch.ones_like(found))


@pytest.mark.parametrize("window", [None, 1, 255, 256, 700, 10_000])
@pytest.mark.parametrize("end", [1, 2, 256, 257, 4_096, 4_097, 8_192])
def test_pieces_are_what_the_token_sees_cut_at_places_of_the_sequence(
    end: int, window: int | None
) -> None:
    pieces = pieces_of(end, window)
    first = 0 if window is None else max(0, end - window)
    assert [token for one in pieces for token in range(*one)] == list(range(first, end))
    assert all(start < stop for start, stop in pieces)
    assert len(pieces) <= 17  # 16 whole ones, and what the first cut leaves over
    assert all(start % 256 == 0 for start, _ in pieces[1:])
