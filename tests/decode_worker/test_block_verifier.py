"""Checksums of landed blocks: of whole blocks, and of blocks that pipeline stages sent in parts of some layers each."""

import random
from dataclasses import replace

from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.decisions.events import LandedBlock
from moonserve.protocol.kv_blocks import KvLayout, checksum, pack_checksums, unpack_checksums

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
NUM_BLOCKS = 3


class Landed:
    """Two landed blocks in a pool. The second has one valid token."""

    def __init__(self) -> None:
        self.memory = bytearray(random.Random(0).randbytes(LAYOUT.pool_bytes(NUM_BLOCKS) + 5))
        self.verifier = BlockVerifier(memoryview(self.memory), LAYOUT, NUM_BLOCKS)
        self.whole = [
            LandedBlock(index=i, block=block, num_tokens=n, checksum=self.sum_of(block, n))
            for i, (block, n) in enumerate([(2, 4), (0, 1)])
        ]

    def sum_of(self, block: int, num_tokens: int, layers: range = range(2)) -> int:
        """Returns a block's checksum by the definition: over the valid bytes of the pieces K0 V0 K1 V1."""
        length = num_tokens * LAYOUT.token_bytes
        pieces = range(2 * layers.start, 2 * layers.stop)
        offsets = [LAYOUT.pool_offset(NUM_BLOCKS, piece, block) for piece in pieces]
        return checksum(bytes(self.memory[at : at + length]) for at in offsets)

    def in_parts(self, one: LandedBlock, *layers: int) -> LandedBlock:
        """Returns the block in parts. Part i has the checksum of layer i and claims `layers[i]` layers."""
        sums = [self.sum_of(one.block, one.num_tokens, range(i, i + 1)) for i in range(len(layers))]
        return replace(one, checksum=pack_checksums(sums), part_layers=layers)

    def flip(self, piece: int, token: int = 0) -> None:
        """Flips a bit in block 0."""
        at = LAYOUT.pool_offset(NUM_BLOCKS, piece, 0) + token * LAYOUT.token_bytes
        self.memory[at] ^= 1


def test_only_changed_valid_bytes_are_detected() -> None:
    """The verdict on blocks in parts also has the whole blocks' checksums, which later readers need."""
    landed = Landed()
    parts = [landed.in_parts(one, 1, 1) for one in landed.whole]
    known = tuple(one.checksum for one in landed.whole)
    landed.flip(1, token=1)  # after the valid tokens
    for blocks, told in ((landed.whole, ()), (parts, known)):
        verdict = landed.verifier.verify(blocks)
        assert (verdict.corrupt, verdict.checksums) == ((), told)
        for piece in range(4):
            landed.flip(piece)
            assert landed.verifier.verify(blocks).corrupt == (1,)
            landed.flip(piece)
    assert landed.verifier.num_bytes(parts) == 5 * LAYOUT.token_bytes * 4


def test_parts_with_missing_layers_match_no_checksum() -> None:
    """Parts that do not cover all layers never match: their bytes would be used without a checksum."""
    landed = Landed()
    for layers in ((1,), (1, 2), (1, 0)):
        block = landed.in_parts(landed.whole[0], *layers)
        assert landed.verifier.verify([block]).corrupt == (0,)


def test_packed_checksums_are_unpacked() -> None:
    parts = (0, 2**64 - 1, 7)
    assert unpack_checksums(pack_checksums(parts), 3) == parts
    assert pack_checksums([parts[1]]) == parts[1], "of one part it is its checksum"
