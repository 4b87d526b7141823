"""Measures the directory's bytes per block, events per second and prefix matches per second, by number of blocks.

Keys are random, so that accesses have no locality. Chains have 16 to 256 blocks; one to three nodes hold each of them
completely. A lookup is one call of `Directory.match` with the leading blocks of a chain, all of which are held. Match
rates are medians over rounds, each of all lookups. Resident memory is the growth of the process. It is meaningful only
for large directories, because small ones fit into memory that the process had freed before.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.measure import median, table, write_json
from moonserve.kvstore.directory import Changes, Directory
from moonserve.protocol.kv_blocks import KEY_BYTES
from moonserve.protocol.request import InstanceId

BLOCKS_PER_MESSAGE = 40_000  # as in nodes' messages (`kvstore.node.event_log`)
SHORTEST, LONGEST = 16, 256
MOST_REPLICAS = 3
LOOKUP_LENGTHS = (1, 4, 16, 64, 256)
LOOKUPS = 10_000

Row = dict[str, Any]
Keys = npt.NDArray[np.uint8]


def main() -> int:
    arguments = _arguments()
    rows = [measure(n, arguments.nodes, arguments.rounds) for n in arguments.blocks]
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    if arguments.json:
        write_json(arguments.json, {"benchmark": "store_directory", "rows": rows})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(num_blocks: int, num_nodes: int, rounds: int) -> Row:
    rng = np.random.default_rng(num_blocks)
    keys: Keys = rng.integers(0, 256, (num_blocks, KEY_BYTES), dtype=np.uint8)
    starts = _chains(num_blocks, rng)
    gc.collect()
    resident = _resident_bytes()
    directory = Directory()
    replicas, taken_s = _fill(directory, keys, starts, num_nodes, rng)
    row: Row = {
        "blocks": num_blocks,
        "nodes": num_nodes,
        "replicas": replicas,
        "bytes_per_block": directory.table.nbytes / num_blocks,
        "resident_per_block": (_resident_bytes() - resident) / num_blocks,
        "events_per_s": replicas / taken_s,
    }
    for length in LOOKUP_LENGTHS:
        chains = _wanted(keys, starts, length, rng)
        per_s = LOOKUPS / median([_timed(directory.match, chains) for _ in range(rounds)])
        row[f"match_{length}_per_s"] = per_s
    row["blocks_matched_per_s"] = row[f"match_{LONGEST}_per_s"] * LONGEST
    return row


def _chains(num_blocks: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns the start of each chain, and the end of the last one."""
    lengths = rng.integers(SHORTEST, LONGEST + 1, num_blocks // SHORTEST + 1)
    lengths[0] = LONGEST  # at least one, even with few blocks
    ends = np.cumsum(lengths)
    return np.concatenate([[0], ends[ends < num_blocks], [num_blocks]])


def _fill(
    directory: Directory,
    keys: Keys,
    starts: npt.NDArray[np.int64],
    num_nodes: int,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """Fills the directory node by node, as inventories arrive. Returns the number of replicas and the seconds."""
    num_chains = len(starts) - 1
    counts = rng.integers(1, MOST_REPLICAS + 1, num_chains)
    first = rng.integers(0, num_nodes, num_chains)
    total, seconds = 0, 0.0
    for node in range(num_nodes):
        held = np.flatnonzero((node - first) % num_nodes < counts)
        for chains in np.array_split(held, max(1, len(held) * LONGEST // BLOCKS_PER_MESSAGE)):
            changes = _message(keys, starts, chains)
            total += len(changes.added) // KEY_BYTES
            begun = time.perf_counter()
            directory.apply_changes(InstanceId(f"store-{node}"), 1, changes, 1, 1, snapshot=False)
            seconds += time.perf_counter() - begun
    return total, seconds


def _message(keys: Keys, starts: npt.NDArray[np.int64], chains: npt.NDArray[np.int64]) -> Changes:
    added = [keys[starts[chain] : starts[chain + 1]].tobytes() for chain in chains]
    parents = [bytes(KEY_BYTES) + chain[:-KEY_BYTES] for chain in added]
    return Changes(added=b"".join(added), parents=b"".join(parents))


def _wanted(keys: Keys, starts: npt.NDArray[np.int64], length: int, rng: np.random.Generator) -> list[bytes]:
    """Returns the `length` leading blocks of random chains that are long enough."""
    long_enough = np.flatnonzero(np.diff(starts) >= length)
    picked = starts[rng.choice(long_enough, LOOKUPS)]
    return [keys[start : start + length].tobytes() for start in picked]


def _timed(match: Callable[[bytes], object], chains: list[bytes]) -> float:
    begun = time.perf_counter()
    for chain in chains:
        match(chain)
    return time.perf_counter() - begun


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    sys.exit(main())
