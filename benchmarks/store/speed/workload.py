"""Workload of every store: the values, the calls, the memory they use, and the verification.

Its rule: all stores access memory in the same pattern. The client's pool has two halves, each several times larger than
the last-level cache. Values are put from random places of the first half and got into random places of the second.
Does not know the stores. Needs numpy only, because it also runs in the peers' environment.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.transfer.workload import KIB, MIB, Bytes, pattern

HALF_BYTES = 128 * MIB
POOL_BYTES = 2 * HALF_BYTES
BATCH = 32
MAX_BATCH_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Load:
    """Calls of one kind: `op` ("put", "get" or "exists") on `batch` values of `value_bytes` each."""

    op: str
    value_bytes: int
    batch: int = 1

    @property
    def call_bytes(self) -> int:
        return self.value_bytes * self.batch

    @property
    def num_values(self) -> int:
        """Number of values that fill half of the pool."""
        return HALF_BYTES // self.value_bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """Values of one call, and their offsets in the pool."""

    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    length: int
    """Bytes of each value."""


SIZES: dict[str, tuple[int, int]] = {
    "64 KiB": (64 * KIB, 1),
    "32×64 KiB": (64 * KIB, BATCH),
    "1 MiB": (MIB, 1),
    "16×1 MiB": (MIB, MAX_BATCH_BYTES // MIB),
    "16 MiB": (16 * MIB, 1),
}
"""Bytes per value and values per call, by the name in the table."""
OPS = ("put", "get")
EXISTS = Load("exists", 64 * KIB)


def loads(sizes: Sequence[str]) -> list[Load]:
    return [Load(op, *SIZES[size]) for size in sizes for op in OPS] + [EXISTS]


def describe(load: Load) -> str:
    times = f"{load.batch}×" if load.batch > 1 else ""
    return f"{load.op} {times}{load.value_bytes >> 10} KiB"


def source_batches(load: Load, kind: str) -> list[Batch]:
    """Returns batches with every value of the pool's first half once. `kind`: part of their keys."""
    return list(_batches(load, kind, base=0, seed=1))


def landing_batches(load: Load, kind: str) -> list[Batch]:
    """Returns batches of the same values in another order, with places in the second half."""
    return list(_batches(load, kind, base=HALF_BYTES, seed=2))


def _batches(load: Load, kind: str, *, base: int, seed: int) -> Iterator[Batch]:
    values = np.random.default_rng(seed).permutation(load.num_values).tolist()
    places = np.random.default_rng(seed + 2).permutation(load.num_values).tolist()
    if not base:
        places = values  # a value's bytes are those at its place in the source half
    for at in range(0, load.num_values, load.batch):
        yield Batch(
            tuple(f"{kind}-{load.value_bytes}-{value}" for value in values[at : at + load.batch]),
            tuple(base + place * load.value_bytes for place in places[at : at + load.batch]),
            load.value_bytes,
        )


def fill(pool: Bytes) -> None:
    """Fills the source half with the pattern and the landing half with zeros."""
    pool[:HALF_BYTES] = pattern()[:HALF_BYTES]
    pool[HALF_BYTES:] = 0


def num_differing(pool: Bytes, batches: Sequence[Batch]) -> int:
    """Returns the number of landed values that differ from the values that were put."""
    wrong = 0
    for batch in batches:
        for key, offset in zip(batch.keys, batch.offsets, strict=True):
            source = int(key.rpartition("-")[2]) * batch.length
            landed = pool[offset : offset + batch.length]
            wrong += not np.array_equal(landed, pool[source : source + batch.length])
    return wrong


def as_json(load: Load) -> dict[str, Any]:
    return asdict(load)
