"""Attention over a range of the pool's KV heads is the same range of attention over all of them, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import Attention, Geometry, make_attention
from engine.kv_pool import KvPool
from protocol.layout import SCALE_BYTES
from tests.engine.attention_cases import Case
from tests.engine.kernels.calls import kernels_folder
from tests.thoroughness import examples


def backend(name: str, case: Case, pool: KvPool, num_kv_heads: int) -> Attention:
    geometry = Geometry(num_kv_heads * case.group, num_kv_heads, case.head_dim)
    return make_attention(name, geometry, pool, kernels_folder())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Single tokens and chunks, with heads between those of the range."""
    lengths = draw(
        st.lists(
            st.tuples(st.integers(0, 70), st.integers(1, 40)).map(lambda at: (at[0], sum(at))),
            min_size=1,
            max_size=4,
        )
    )
    singles = draw(st.lists(st.integers(1, 90).map(lambda end: (end - 1, end)), max_size=4))
    return Case(
        lengths=[*singles, *(one for one in lengths if one[1] - one[0] > 1)] or [(0, 2)],
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        kept=draw(st.sampled_from([None, "int8", "fp8"])),
        kv_heads=draw(st.integers(2, 6)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([16, 32, 64])),
        window=draw(st.none() | st.integers(1, 50)),
        seed=draw(st.integers(0, 1000)),
    )


def forget_nans(piece: torch.Tensor) -> None:
    if piece.dtype == torch.uint8:
        scales = piece[..., -SCALE_BYTES:].view(torch.float32)[..., 0]
        piece[scales.isnan()] = 0
    else:
        piece.nan_to_num_()


@pytest.mark.parametrize("name", ["torch", "native"])
@given(case=cases(), data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_a_range_of_heads_sees_what_all_heads_see(
    name: str, case: Case, data: st.DataObject
) -> None:
    """Whatever lies in the pool between the range's heads of one token and of the next."""
    first = data.draw(st.integers(0, case.kv_heads - 1))
    heads = range(first, data.draw(st.integers(first + 1, case.kv_heads)))
    if name == "torch":  # reads whole blocks
        for piece in (*case.pool.keys, *case.pool.values):
            forget_nans(piece)
    whole = case.attend(backend(name, case, case.pool, case.kv_heads))
    memory, layout = case.pool.memory, case.pool.layout
    pool = KvPool(layout, case.pool.num_blocks, memory, heads=heads, dtype=case.dtype)
    own = backend(name, case, pool, len(heads))
    queries = case.queries[:, heads.start * case.group : heads.stop * case.group]
    keys, values = (part[:, heads.start : heads.stop] for part in (case.keys, case.values))
    found = own.attend(0, own.plan(case.spans, case.window), queries, keys, values)
    columns = slice(
        heads.start * case.group * case.head_dim, heads.stop * case.group * case.head_dim
    )
    if name == "native":
        assert torch.equal(found, whole[:, columns])
    else:  # a library's products, whose sums may depend on the shape
        torch.testing.assert_close(found, whole[:, columns], atol=2e-2, rtol=2e-2)
