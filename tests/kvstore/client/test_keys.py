"""What counts as a key."""

from __future__ import annotations

import pytest

from kvstore.client.keys import KEPT_KEYS, Block, Key, Keys, block_of, blocks_of, chain, plain_key
from protocol.errors import InvalidRequest
from protocol.keys import BlockKey

A, B, C = (BlockKey(bytes([number]) * 16) for number in range(3))


def test_a_chain_has_a_head_and_parents_and_a_plain_key_is_its_own_head() -> None:
    assert chain([A, B, C]) == [Block(A, A, None), Block(B, A, A), Block(C, A, B)]
    assert chain([]) == []
    assert block_of(b"key") == Block(plain_key(b"key"), plain_key(b"key"))
    assert block_of(A).key != A, "bytes of a block key's length are a plain key too"


def test_what_is_no_key_is_refused() -> None:
    assert len(plain_key(bytes(65536))) == 16
    with pytest.raises(InvalidRequest, match="65536"):
        plain_key(bytes(65537))
    with pytest.raises(InvalidRequest, match="not str"):
        block_of("text")  # type: ignore[arg-type]
    for wrong in (b"one", "text", ["text"], [3], [[]], [None]):
        for of in (Keys, blocks_of):
            with pytest.raises(InvalidRequest):
                of(wrong)  # type: ignore[arg-type]


def test_the_keys_of_a_call_are_those_of_their_blocks() -> None:
    """Known or new, whatever they are made of, and however many."""
    given: list[Key] = [b"one", *chain([A, B]), b"", bytes(200)]
    given += [bytearray(b"two"), memoryview(b"one")]  # type: ignore[list-item]
    for _ in range(2):
        keys = Keys(given)
        assert keys.blocks() == blocks_of(given)
        assert keys.stored == [block.key for block in keys.blocks()]
        assert len(keys) == len(given)
        assert keys.at([0, 2]).stored == [keys.stored[0], keys.stored[2]]
    many = [b"%d" % number for number in range(KEPT_KEYS + 10)]
    for some in (many, many[:5], [b"one", b"one"]):
        assert Keys(some).stored == [plain_key(key) for key in some]
