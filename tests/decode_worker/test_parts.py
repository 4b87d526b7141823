"""Blocks whose writers are a pipeline's stages: each has a checksum of its own layers only."""

from __future__ import annotations

from dataclasses import replace

from decode_worker.verify import BlockVerifier
from protocol.checksum import checksum, join, split
from tests.decode_worker.test_verify import LAYOUT, NUM_BLOCKS, expected, landed, pool_bytes


def part(memory: bytearray, block: int, num_tokens: int, layer: int) -> int:
    length = num_tokens * LAYOUT.token_bytes
    offsets = [LAYOUT.pool_offset(NUM_BLOCKS, 2 * layer + half, block) for half in range(2)]
    return checksum(bytes(memory[at : at + length]) for at in offsets)


def test_parts_are_verified_and_the_whole_blocks_checksum_follows() -> None:
    """Whoever gets the block from here, a store or another worker, needs that of the whole."""
    memory = pool_bytes()
    blocks = [
        replace(
            one,
            checksum=join([part(memory, one.block, one.num_tokens, layer) for layer in range(2)]),
            part_layers=(1, 1),
        )
        for one in landed(memory)
    ]
    verifier = BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS)
    verdict = verifier.verdict(blocks)
    assert verdict.corrupt == ()
    assert verdict.checksums == tuple(expected(memory, b.block, b.num_tokens) for b in blocks)
    for piece in range(4):
        memory[LAYOUT.pool_offset(NUM_BLOCKS, piece, 0)] ^= 1
        assert verifier.verdict(blocks).corrupt == (1,)
        memory[LAYOUT.pool_offset(NUM_BLOCKS, piece, 0)] ^= 1


def test_parts_that_leave_layers_out_match_nothing() -> None:
    """Otherwise bytes that nobody vouched for would be decoded from."""
    memory = pool_bytes()
    [one, _] = landed(memory)
    first = part(memory, one.block, one.num_tokens, 0)
    verifier = BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS)
    for layers in ((1,), (1, 2), (1, 0)):
        sums = join([first, *(part(memory, one.block, one.num_tokens, 1) for _ in layers[1:])])
        block = replace(one, checksum=sums, part_layers=layers)
        assert verifier.verdict([block]).corrupt == (0,)


def test_whole_blocks_are_compared_as_ever() -> None:
    """Nothing is known then that was not told."""
    memory = pool_bytes()
    verifier = BlockVerifier(memoryview(memory), LAYOUT, NUM_BLOCKS)
    assert verifier.verdict(landed(memory)).corrupt == ()
    assert verifier.verdict(landed(memory)).checksums == ()


def test_joined_checksums_come_apart_again() -> None:
    parts = (0, 2**64 - 1, 7)
    assert split(join(parts), 3) == parts
    assert join([parts[1]]) == parts[1], "of one part it is its checksum"
