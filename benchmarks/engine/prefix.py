"""Compares the prefix index as a radix tree with one dict of keys, through the workers' block pool.

    python -m benchmarks.engine.prefix [--blocks 100000 1000000] [--rounds 5] [--json FILE]

The pool is filled with conversations of 64 branches each: a common prefix of 32 blocks and 64 continuations of 96, as
128-block prompts, all released. Then, in each round, both indices take turns at:

- *match*: 1,000 of the 128-block prompts, chosen at random; no block is retained. *miss*: the same number of prompts
  whose last 64 blocks differ.
- *publish*: prompts of 128 blocks, 96 of them new, replace the oldest; only the calls to `publish` are timed.
- *evict*: `allocate` of 128 blocks from the full pool, which evicts 128 blocks.
- *turn*: all calls of a worker for a prompt: match, retain, allocate, publish, release.

Figures are microseconds of processor time per call (*publish*: per block), medians of the rounds. *bytes*: memory of a
full pool per block, with the key objects if the index keeps them. *collect*: time of a garbage collection over the full
pool.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine.dict_index import DictIndex
from benchmarks.measure import median, table, write_json
from engine.block_pool import BlockPool
from engine.prefix import RadixTree
from protocol.keys import KEY_BYTES, NO_PARENT, BlockKey

COMMON, OWN, BRANCHES = 32, 96, 64
PROMPT = COMMON + OWN
CALLS = 1000
CHECKSUM = 2**63  # first of the checksums, which are as large as real ones
INDICES: dict[str, Callable[..., Any]] = {"dict": DictIndex, "radix tree": RadixTree}
FIGURES = ("match", "miss", "publish", "evict", "turn")

Row = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    rows = [row for number in arguments.blocks for row in measure(number, arguments.rounds)]
    columns = tuple(rows[0])
    print(table(columns, [[row[column] for column in columns] for row in rows]))
    write_json(arguments.json, {"benchmark": "engine_prefix", "rows": rows})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("out/engine/prefix.json"))
    return parser.parse_args()


def measure(num_blocks: int, rounds: int) -> list[Row]:
    """Returns one row of figures per index."""
    loads = {name: Load(num_blocks, make) for name, make in INDICES.items()}
    measured: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in loads}
    for _ in range(rounds):
        for figure in FIGURES:
            for name, load in loads.items():
                measured[name][figure].append(getattr(load, figure)())
    for load in loads.values():
        load.pool.validate()
    return [
        {
            "index": name,
            "blocks": num_blocks,
            "bytes": load.bytes_per_block,
            "collect_ms": load.collect_ms,
            **{f"{figure}_us": median(values) for figure, values in measured[name].items()},
        }
        for name, load in loads.items()
    ]


class Load:
    """A full pool, and the prompts that were published in it last."""

    def __init__(self, num_blocks: int, make_index: Callable[..., Any]) -> None:
        self._rng = random.Random(num_blocks)
        gc.collect()
        gc.freeze()  # excludes older objects from the collections below
        tracemalloc.start()
        self.pool = BlockPool(
            num_blocks,
            on_added=lambda key, parent: None,
            on_removed=lambda key: None,
            make_index=make_index,
        )
        # The latest prompts; their own blocks take at most half of the pool.
        self._seeds: deque[tuple[int, int]] = deque(maxlen=min(10_000, num_blocks // 2 // PROMPT))
        for number in range(-(-num_blocks // (COMMON + BRANCHES * OWN))):
            self._begin(number, num_blocks)
        self._next = 10**9
        gc.collect()
        self.bytes_per_block = tracemalloc.get_traced_memory()[0] / num_blocks
        tracemalloc.stop()
        self.collect_ms = _collect_ms()
        gc.unfreeze()

    def _begin(self, conversation: int, num_blocks: int) -> None:
        for branch in range(BRANCHES):
            fresh = OWN if branch else PROMPT
            if num_blocks - self.pool.num_cached < fresh:
                return
            self._take(prompt(conversation, branch))
            self._seeds.append((conversation, branch))

    def _take(self, keys: list[BlockKey]) -> float:
        """Takes a prompt through match, allocate, publish and release; returns the microseconds of publishing."""
        pool = self.pool
        found = pool.match_prefix(keys)
        pool.retain(found)
        pool.reused(found)
        fresh = pool.allocate(len(keys) - len(found))
        assert fresh is not None, "all is free again after each prompt"
        first, publish = len(found), pool.publish
        begun = time.process_time()
        for index, block in enumerate(fresh, first):
            parent = keys[index - 1] if index else NO_PARENT
            publish(block, keys[index], parent, CHECKSUM + index)
        published = time.process_time() - begun
        pool.release([*found, *fresh])
        return published * 1e6

    def _prompts(self, count: int) -> list[list[BlockKey]]:
        return [prompt(*self._rng.choice(self._seeds)) for _ in range(count)]

    def match(self) -> float:
        return self._matching(self._prompts(CALLS))

    def miss(self) -> float:
        half = PROMPT // 2
        own = prompt(-1, 0)[half:]
        return self._matching([keys[:half] + own for keys in self._prompts(CALLS)])

    def _matching(self, prompts: list[list[BlockKey]]) -> float:
        match = self.pool.match_prefix
        begun = time.process_time()
        for keys in prompts:
            match(keys)
        return (time.process_time() - begun) / len(prompts) * 1e6

    def publish(self) -> float:
        count = CALLS // 10
        return sum(self._take(keys) for keys in self._new_prompts(count)) / (count * OWN)

    def turn(self) -> float:
        prompts = self._new_prompts(CALLS // 10)
        begun = time.process_time()
        for keys in prompts:
            self._take(keys)
        return (time.process_time() - begun) / len(prompts) * 1e6

    def _new_prompts(self, count: int) -> list[list[BlockKey]]:
        """Returns new prompts of the latest conversation, whose common prefix so stays recently used."""
        conversation = self._seeds[-1][0]
        coming = [(conversation, self._next + number) for number in range(count)]
        self._next += count
        self._seeds.extend(coming)
        return [prompt(*seed) for seed in coming]

    def evict(self) -> float:
        pool, count = self.pool, CALLS // 10
        begun = time.process_time()
        taken = [pool.allocate(PROMPT) for _ in range(count)]
        took = time.process_time() - begun
        self._fill(taken)
        return took / count * 1e6

    def _fill(self, taken: list[list[int] | None]) -> None:
        """Releases the blocks and fills the pool again with new prompts."""
        for blocks in taken:
            assert blocks is not None, "the pool was full of idle blocks"
            self._next += 1
            self.pool.release(blocks)
            self._take(prompt(self._next, 0))
            self._seeds.append((self._next, 0))


def prompt(conversation: int, branch: int) -> list[BlockKey]:
    """Returns the keys of a prompt; the first COMMON keys depend on the conversation only."""
    common = random.Random(conversation).randbytes(KEY_BYTES * COMMON)
    own = random.Random(f"{conversation} {branch}").randbytes(KEY_BYTES * OWN)
    packed = common + own
    return [BlockKey(packed[i : i + KEY_BYTES]) for i in range(0, len(packed), KEY_BYTES)]


def _collect_ms() -> float:
    gc.collect()
    begun = time.process_time()
    for _ in range(3):
        gc.collect()
    return (time.process_time() - begun) / 3 * 1e3


if __name__ == "__main__":
    main()
