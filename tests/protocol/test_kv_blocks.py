"""Tests of blocks: their keys, which are chained, salted and stable, and the offsets of their pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.kv_blocks import (
    KEY_BYTES,
    KV_DTYPES,
    KvLayout,
    block_keys,
    fingerprint,
    pack_keys,
    pack_tokens,
    root_key,
    unpack_keys,
    unpack_tokens,
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
ROOT = root_key("fingerprint")


@given(tokens)
def test_tokens_survive_packing(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids


@given(tokens, st.integers(1, 9))
def test_only_full_blocks_have_keys(token_ids: list[int], block_size: int) -> None:
    keys = block_keys(ROOT, token_ids, block_size)
    assert len(keys) == len(token_ids) // block_size
    assert all(len(key) == KEY_BYTES for key in keys)
    assert unpack_keys(pack_keys(keys)) == keys


@given(tokens, tokens, st.integers(1, 9))
def test_keys_are_equal_as_far_as_prefixes_are_equal(left: list[int], right: list[int], block_size: int) -> None:
    shared = 0
    while left[shared : shared + 1] == right[shared : shared + 1] and shared < len(left):
        shared += 1
    pairs = zip(block_keys(ROOT, left, block_size), block_keys(ROOT, right, block_size), strict=False)
    for index, (a, b) in enumerate(pairs):
        assert (a == b) == ((index + 1) * block_size <= shared)


def test_keys_differ_by_salt_and_model() -> None:
    roots = {root_key(f, s) for f in ("a", "ab") for s in ("", "b", "bb")}
    assert len(roots) == 6
    assert len({block_keys(root, range(4), 4)[0] for root in roots}) == 6


def test_keys_do_not_change_between_releases() -> None:
    """Keys equal fixed values. Stored blocks outlive a process, so their derivation may change only deliberately."""
    assert root_key("fp", "salt").hex() == "cc91f09f4b56fa5a817f04b6957a0a02"
    assert block_keys(root_key("fp", "salt"), [1, 2, 3, 4], 2)[1].hex() == "fbab2c9d58ee818ad82ef9503e1affda"


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
def test_unsupported_kv_dtype_is_refused(dtype: str, head_dim: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KvLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype)


def test_fingerprint_changes_with_weights_dimensions_and_dtypes() -> None:
    dimensions = {"num_layers": 2, "block_size": 3, "num_kv_heads": 4, "head_dim": 8}
    base = KvLayout(**dimensions, dtype="float32")
    others = [KvLayout(**{**dimensions, name: 12}, dtype="float32") for name in dimensions]
    others += [KvLayout(**dimensions, dtype=dtype) for dtype in ("bfloat16", "int8", "fp8")]
    prints = [fingerprint("w", layout) for layout in (base, *others)]
    prints += [fingerprint("v", base), *(fingerprint("w", quantised, "bfloat16") for quantised in others[-2:])]
    assert len(set(prints)) == len(prints)
    assert fingerprint("w", base, "float32") == prints[0]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quantised_head_has_a_byte_per_element_and_a_scale(dtype: str) -> None:
    layout = KvLayout(num_layers=3, block_size=16, num_kv_heads=4, head_dim=64, dtype=dtype)
    assert (layout.head_bytes, layout.token_bytes) == (68, 272)
    assert layout.block_bytes == 2 * 3 * 16 * 272
