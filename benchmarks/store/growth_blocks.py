"""Part 5, blocks: measures the time and resident memory of one node's metadata, from 10⁴ to 10⁷ blocks.

The node's state is driven directly, without RPC, and no bytes are moved. Each point runs in its own process, because
memory freed by another point would hide the memory that this one takes.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import median
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state import eviction
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.eviction import POLICY_NAMES
from moonserve.kvstore.state.objects import PutRequest, Tier, Watermarks
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey

CHAIN = 16
LENGTH = 200
"""Bytes of an object: it takes one unit of the segment, for which no memory is allocated."""
SAMPLES = 5
OPERATIONS = 2_000
LOOKUP_BATCH = 64
PUT_S = 1e-3
"""Time between puts on the state's clock."""
POINT_TIMEOUT_S = 1_200.0
KNOWN_CHAINS = 4_096
"""Number of chains that lookups and leases use."""

Point = dict[str, Any]
Chain = list[BlockKey]


class NullListener:
    """Listener that ignores all announcements of the catalog."""

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None: ...

    def moved(self, key: BlockKey, tier: Tier) -> None: ...

    def removed(self, key: BlockKey) -> None: ...


def measure(points: Sequence[tuple[int, str]]) -> list[Point]:
    """Measures (blocks, policy) points one after the other."""
    return [_in_process(blocks, policy) for blocks, policy in points]


def chosen_points(*, quick: bool, full: bool) -> list[tuple[int, str]]:
    """Returns the points: all policies at a million blocks, and LRU, the default, at every size."""
    if quick:
        return [(10_000, "lru"), (100_000, "lru"), (1_000_000, "lru")]
    sizes = [10_000, 100_000, 1_000_000, 5_000_000, *([10_000_000] if full else [])]
    others = [(1_000_000, name) for name in POLICY_NAMES if name != "lru"]
    return [*((size, "lru") for size in sizes), *others]


def _in_process(blocks: int, policy: str) -> Point:
    print(f"· {blocks:,} blocks, {policy}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.store.growth_blocks", str(blocks), policy]
    where = {"blocks": blocks, "policy": policy}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=POINT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return where | {"failed": f"not within {POINT_TIMEOUT_S:g} s"}
    if done.returncode:
        return where | {"failed": (done.stderr.strip().splitlines() or ["died"])[-1]}
    point: Point = json.loads(done.stdout)
    return where | point


def point(blocks: int, policy: str) -> Point:
    """Measures a point in this process, which must be new."""
    catalog = Catalog(
        blocks * 6 // 5 * ALIGNMENT,
        index=KeyIndex(),
        policies=lambda: eviction.make(policy),
        announce=NullListener(),
        watermarks=Watermarks(evict_above=1.0),
    )
    state = StoreState(catalog)
    before = resident_bytes()
    put_s = _fill(state, blocks)
    resident = resident_bytes() - before
    now = blocks * PUT_S
    chains = [_chain(number) for number in _some(blocks // CHAIN)]
    keys = [key for chain in chains for key in chain]
    return {
        "resident_bytes": resident / blocks,
        "metadata_bytes": catalog.metadata_bytes / blocks,
        "put_us": put_s / blocks * 1e6,
        "lease_us": _lease_us(state, chains, now),
        "find_s": _rate(catalog.find, keys),
        "find_batch_s": _batch_rate(state, keys),
    }


def _fill(state: StoreState, blocks: int) -> float:
    """Puts all blocks; returns the seconds. Keeps no keys, because they would count as metadata."""
    spent = 0.0
    for number in range(blocks // CHAIN):
        keys = _chain(number)
        begin = time.perf_counter()
        _put(state, str(number), keys, number * CHAIN * PUT_S)
        spent += time.perf_counter() - begin
    return spent


def _chain(number: int) -> Chain:
    packed = random.Random(number).randbytes(CHAIN * KEY_BYTES)
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def _some(num_chains: int) -> list[int]:
    return random.Random(1).sample(range(num_chains), min(KNOWN_CHAINS, num_chains))


def _put(state: StoreState, name: str, keys: Chain, now: float) -> None:
    parents = [None, *keys[:-1]]
    wishes = [PutRequest(key=key, parent=parent, length=LENGTH) for key, parent in zip(keys, parents, strict=True)]
    state.reservations.reserve(name, wishes, 30.0, now)
    state.reservations.commit(name, dict.fromkeys(keys, 1), now)
    state.reservations.verified(name, (), now)


def _lease_us(state: StoreState, chains: Sequence[Chain], now: float) -> float:
    names = map(str, itertools.count())

    def once(keys: Chain) -> None:
        name = next(names)
        state.leases.grant(name, keys, 10.0, now)
        state.leases.release(name, now)

    return 1e6 / _rate(once, chains)


def _batch_rate(state: StoreState, keys: Sequence[BlockKey]) -> float:
    batches = [keys[at : at + LOOKUP_BATCH] for at in range(0, len(keys), LOOKUP_BATCH)]
    return LOOKUP_BATCH * _rate(state.catalog.present, batches)


def _rate(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Returns calls per second, the median of several samples with different arguments."""
    rng = random.Random(2)
    rates = []
    for _ in range(SAMPLES):
        chosen = rng.choices(arguments, k=OPERATIONS)
        begin = time.perf_counter()
        for each in chosen:
            call(each)
        rates.append(OPERATIONS / (time.perf_counter() - begin))
    return median(rates)


def resident_bytes() -> int:
    """Returns the current resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("blocks", type=int)
    parser.add_argument("policy", choices=POLICY_NAMES)
    arguments = parser.parse_args()
    print(json.dumps(point(arguments.blocks, arguments.policy)))


if __name__ == "__main__":
    main()
