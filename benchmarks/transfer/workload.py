"""Workload of every contestant: which blocks move where, in which order, and the verification.

Its rule: all contestants access memory in the same pattern. Both ends have a pool several times larger than the
last-level cache. Blocks move between two fixed random permutations of its places. So every transfer is cold, none are
adjacent (nothing can be coalesced), and memory copies are measured with the same cache and TLB misses as transfers.
Does not know the contestants. Needs numpy only, because it also runs in the peers' environment.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
"""Remote and local offset of each block of one batch; shape (requests, blocks, 2)."""

REMOTE, LOCAL = 0, 1
KIB, MIB = 1 << 10, 1 << 20
POOL_BYTES = 128 * MIB
REQUESTS_PER_BATCH = 16
BATCH_BYTES = 32 * MIB
"""Largest size of a batch: it has 16 requests, or as many as fit."""
OUTSTANDING = 2
BLOCKS_PER_SWEEP = 8192
"""Limits 4 KiB blocks to a random quarter of the pool, because slow contestants would take seconds."""
PATTERN_BYTES = MIB + 4099
"""Not a multiple of any block size, so that neighbouring blocks differ."""


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of work: `op` on requests of `blocks` blocks of `block_bytes` each."""

    op: str
    """"read" or "write", seen from the initiator."""
    block_bytes: int
    blocks: int = 1
    requests: int = 1
    """Requests per batch."""
    outstanding: int = OUTSTANDING
    """Batches in flight."""
    sweep_blocks: int = BLOCKS_PER_SWEEP

    @property
    def batch_bytes(self) -> int:
        return self.requests * self.blocks * self.block_bytes

    def batches(self) -> list[Offsets]:
        """Returns the batches of one sweep over the pool."""
        places = POOL_BYTES // self.block_bytes
        per_batch = self.requests * self.blocks
        used = min(places, self.sweep_blocks) // per_batch * per_batch
        order = np.random.default_rng(self.block_bytes)
        ends = [order.permutation(places)[:used] for _ in (REMOTE, LOCAL)]
        offsets = np.stack(ends, axis=-1).astype(np.int64) * self.block_bytes
        return list(offsets.reshape(-1, self.requests, self.blocks, 2))


def throughput(op: str, block_bytes: int, blocks: int = 1) -> Load:
    """Returns a load with several requests in flight, the same number for every contestant."""
    fit = BATCH_BYTES // (block_bytes * blocks)
    return Load(op, block_bytes, blocks, 1 if blocks > 1 else max(1, min(REQUESTS_PER_BATCH, fit)))


LATENCY = Load("read", 64 * KIB, outstanding=1, sweep_blocks=512)
SIZES: dict[str, tuple[int, int]] = {
    "4 KiB": (4 * KIB, 1),
    "64 KiB": (64 * KIB, 1),
    "128 KiB": (128 * KIB, 1),
    "1 MiB": (MIB, 1),
    "16 MiB": (16 * MIB, 1),
    "64 MiB": (64 * MIB, 1),
    "1000×16 KiB": (16 * KIB, 1000),
}
"""Block size and blocks per request, by the name in the table."""


def pattern() -> Bytes:
    """Returns the content of the source pool during verification; the same in both processes."""
    base = np.random.default_rng(1).integers(0, 256, PATTERN_BYTES, dtype=np.uint8)
    return np.resize(base, POOL_BYTES)


def differing_blocks(landed: Bytes, load: Load) -> int:
    """Returns the number of blocks of one sweep that differ from the source."""
    source = pattern().reshape(-1, load.block_bytes)
    target = landed.reshape(-1, load.block_bytes)
    come_from, go_to = (REMOTE, LOCAL) if load.op == "read" else (LOCAL, REMOTE)
    wrong = 0
    for batch in load.batches():
        for places in batch.reshape(-1, 2) // load.block_bytes:
            wrong += not np.array_equal(target[places[go_to]], source[places[come_from]])
    return wrong


def as_json(load: Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in Load.__slots__}
