"""Where the pieces of a block lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.layout import KV_DTYPES, KvLayout, fingerprint

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 3),
    block_size=st.integers(1, 4),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([4, 8]),
    dtype=st.sampled_from(KV_DTYPES),
)


@given(layouts, st.integers(1, 5))
def test_pieces_tile_the_pool_without_gap_or_overlap(layout: KvLayout, num_blocks: int) -> None:
    offsets = sorted(
        layout.pool_offset(num_blocks, piece, block)
        for piece in range(layout.pieces_per_block)
        for block in range(num_blocks)
    )
    assert offsets == list(range(0, layout.pool_bytes(num_blocks), layout.piece_bytes))


@given(layouts, st.integers(0, 40))
def test_blocks_for_is_the_smallest_number_that_holds_the_tokens(layout: KvLayout, num_tokens: int) -> None:
    blocks = layout.blocks_for(num_tokens)
    assert blocks * layout.block_size >= num_tokens > (blocks - 1) * layout.block_size


@pytest.mark.parametrize(("dtype", "head_dim", "reason"), [("float16", 1, "float16"), ("int8", 6, "a multiple of 4")])
def test_what_kv_cannot_be_kept_in_is_refused(dtype: str, head_dim: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KvLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype)


def test_the_fingerprint_changes_with_weights_and_with_every_dimension() -> None:
    dimensions = {"num_layers": 2, "block_size": 3, "num_kv_heads": 4, "head_dim": 5}
    base = KvLayout(**dimensions, dtype="float32")
    others = [KvLayout(**{**dimensions, name: 7}, dtype="float32") for name in dimensions]
    others.append(KvLayout(**dimensions, dtype="bfloat16"))
    prints = {fingerprint("w", layout) for layout in [base, *others]} | {fingerprint("v", base)}
    assert len(prints) == len(others) + 2


def test_the_fingerprint_changes_with_what_kv_is_kept_in_and_with_what_it_is_computed_in() -> None:
    dimensions = {"num_layers": 2, "block_size": 3, "num_kv_heads": 4, "head_dim": 8}
    prints = {
        fingerprint("w", KvLayout(**dimensions, dtype=kept), computed)
        for kept in ("int8", "fp8")
        for computed in ("float32", "bfloat16")
    }
    plain = KvLayout(**dimensions, dtype="float32")
    assert len(prints) == 4
    assert fingerprint("w", plain, "float32") == fingerprint("w", plain) not in prints


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_quantised_head_is_a_byte_per_element_and_its_scale(dtype: str) -> None:
    layout = KvLayout(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype=dtype)
    assert (layout.head_bytes, layout.token_bytes) == (68, 272)
    assert layout.block_bytes == 2 * 3 * 16 * 272
