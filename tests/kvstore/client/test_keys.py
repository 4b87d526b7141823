"""What counts as a key."""

from __future__ import annotations

import pytest

from kvstore.client.keys import KEPT_KEYS, Block, Key, Keys, block_of, blocks_of, chain, plain_key
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey

A, B, C = (BlockKey(bytes([number]) * 16) for number in range(3))


def test_the_blocks_of_a_chain_know_their_head_and_their_parents() -> None:
    assert chain([A, B, C]) == [Block(A, A, None), Block(B, A, A), Block(C, A, B)]
    assert chain([]) == []


def test_a_plain_key_is_its_own_head_and_has_no_parent() -> None:
    block = block_of(b"key")
    assert block == Block(plain_key(b"key"), plain_key(b"key"))
    assert block_of(bytearray(b"key")) == block  # type: ignore[arg-type]


def test_bytes_of_a_block_keys_length_are_a_plain_key_too() -> None:
    assert block_of(A).key != A


def test_a_key_of_64_kib_is_one_and_a_longer_one_is_refused() -> None:
    assert len(plain_key(bytes(65536))) == 16
    with pytest.raises(InvalidRequest, match="65536"):
        plain_key(bytes(65537))


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not str"):
        block_of("text")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="not one key"):
        blocks_of(b"one")  # type: ignore[arg-type]


def test_the_keys_of_a_call_are_those_of_their_blocks() -> None:
    """Known or new, whatever they are made of."""
    given: list[Key] = [
        b"one",
        *chain([A, B]),
        b"",
        bytes(200),
        bytearray(b"two"),
        memoryview(b"one"),
    ]  # type: ignore[list-item]
    for _ in range(2):
        keys = Keys(given)
        assert keys.blocks() == blocks_of(given)
        assert keys.stored == [block.key for block in keys.blocks()]
        assert len(keys) == len(given)
        assert keys.at([0, 2]).stored == [keys.stored[0], keys.stored[2]]
    known = Keys([b"one", b"one"])
    assert known.stored == 2 * [plain_key(b"one")]


def test_any_number_of_keys_may_be_known() -> None:
    keys = [b"%d" % number for number in range(KEPT_KEYS + 10)]
    assert Keys(keys).stored == [plain_key(key) for key in keys]
    assert Keys(keys[:5]).stored == [plain_key(key) for key in keys[:5]]


def test_what_is_no_sequence_of_keys_is_refused() -> None:
    for wrong in (b"one", "text", ["text"], [3], [[]], [None]):
        with pytest.raises(InvalidRequest):
            Keys(wrong)  # type: ignore[arg-type]
