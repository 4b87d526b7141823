"""Checksums of landed blocks, read from a pool."""

from __future__ import annotations

import random

from decode_worker.actions import LandedBlock
from decode_worker.verify import BlockVerifier
from protocol.checksum import checksum
from protocol.layout import KvLayout

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
NUM_BLOCKS = 3


def pool_bytes() -> bytearray:
    return bytearray(random.Random(0).randbytes(LAYOUT.pool_bytes(NUM_BLOCKS) + 5))


def expected(memory: bytearray, block: int, num_tokens: int) -> int:
    """By the definition: the valid bytes of the pieces K0 V0 K1 V1."""
    length = num_tokens * LAYOUT.token_bytes
    offsets = [LAYOUT.pool_offset(NUM_BLOCKS, piece, block) for piece in range(4)]
    return checksum(bytes(memory[at : at + length]) for at in offsets)


def landed(memory: bytearray) -> list[LandedBlock]:
    return [
        LandedBlock(index=i, block=block, num_tokens=n, checksum=expected(memory, block, n))
        for i, (block, n) in enumerate([(2, 4), (0, 1)])
    ]


def test_intact_blocks_pass() -> None:
    memory = pool_bytes()
    verifier = BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS)
    assert verifier.corrupt(landed(memory)) == ()
    assert verifier.num_bytes(landed(memory)) == 5 * LAYOUT.token_bytes * 4


def test_any_changed_valid_byte_is_found() -> None:
    memory = pool_bytes()
    blocks = landed(memory)
    verifier = BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS)
    for piece in range(4):
        memory[LAYOUT.pool_offset(NUM_BLOCKS, piece, 0)] ^= 1
        assert verifier.corrupt(blocks) == (1,)
        memory[LAYOUT.pool_offset(NUM_BLOCKS, piece, 0)] ^= 1


def test_bytes_behind_the_valid_tokens_do_not_matter() -> None:
    memory = pool_bytes()
    blocks = landed(memory)
    memory[LAYOUT.pool_offset(NUM_BLOCKS, 1, 0) + LAYOUT.token_bytes] ^= 1
    assert BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS).corrupt(blocks) == ()
