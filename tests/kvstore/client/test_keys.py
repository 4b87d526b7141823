"""What counts as a key."""

from __future__ import annotations

import pytest

from kvstore.client.keys import Block, block_of, blocks_of, chain, plain_key
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
