"""Block keys: chained, salted, stable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.keys import KEY_BYTES, block_keys, pack_keys, pack_tokens, root_key, unpack_keys, unpack_tokens

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
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(left: list[int], right: list[int], block_size: int) -> None:
    shared = 0
    while left[shared : shared + 1] == right[shared : shared + 1] and shared < len(left):
        shared += 1
    pairs = zip(block_keys(ROOT, left, block_size), block_keys(ROOT, right, block_size), strict=False)
    for index, (a, b) in enumerate(pairs):
        assert (a == b) == ((index + 1) * block_size <= shared)


def test_other_salts_and_other_models_share_no_key() -> None:
    roots = {root_key(f, s) for f in ("a", "ab") for s in ("", "b", "bb")}
    assert len(roots) == 6
    assert len({block_keys(root, range(4), 4)[0] for root in roots}) == 6


def test_keys_do_not_change_between_releases() -> None:
    """Stored blocks outlive a process; a changed derivation must be a deliberate act."""
    assert root_key("fp", "salt").hex() == "cc91f09f4b56fa5a817f04b6957a0a02"
    assert block_keys(root_key("fp", "salt"), [1, 2, 3, 4], 2)[1].hex() == "fbab2c9d58ee818ad82ef9503e1affda"
