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

import argparse
import gc
import heapq
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import median, table, write_json
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.eviction import LeastRecentlyUsed, Rank
from moonserve.engine.kv_cache.radix_tree import MAX_HITS, RadixTree
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey
from moonserve.protocol.request import BlockId

# Baseline for the radix tree: one dict of keys, a set of children per block, and a heap of blocks to evict.
#
# It is the block pool's former index and behaves like `RadixTree`, whose tests compare the two.

_SLACK = 64  # heap entries allowed beyond two per block, before stale ones are removed


class DictIndex:
    """Index of the findable blocks below `num_blocks`. Each block has its own entry in every structure."""

    def __init__(
        self,
        num_blocks: int,
        policy: LeastRecentlyUsed,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
    ) -> None:
        self._num_blocks = num_blocks
        self._policy = policy
        self._on_added = on_added
        self._on_removed = on_removed
        self._by_key: dict[BlockKey, BlockId] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents: list[BlockKey | None] = [None] * num_blocks
        self._checksums: list[int | None] = [None] * num_blocks
        self._children: dict[BlockKey, set[BlockKey]] = {}
        self._hits = bytearray(num_blocks)
        self._is_idle = bytearray(num_blocks)
        self._num_idle = 0
        self._heap: list[tuple[Rank, BlockId]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def is_findable(self, block: BlockId) -> bool:
        return self._keys[block] is not None

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        found: list[BlockId] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int, *, hits: int = 0) -> bool:
        if key in self._by_key:
            return False
        self._keys[block], self._parents[block], self._checksums[block] = key, parent, checksum
        self._hits[block] = hits
        self._by_key[key] = block
        self._children.setdefault(parent, set()).add(key)
        self._on_added(key, parent)
        return True

    def key_of(self, block: BlockId) -> BlockKey | None:
        return self._keys[block]

    def checksum_of(self, block: BlockId) -> int | None:
        return self._checksums[block]

    def hits_of(self, block: BlockId) -> int:
        return self._hits[block]

    def hit(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if self._hits[block] < MAX_HITS:
                self._hits[block] += 1

    def mark_held(self, block: BlockId) -> None:
        self._is_idle[block] = False
        self._num_idle -= 1

    def mark_idle(self, block: BlockId) -> None:
        self._is_idle[block] = True
        self._num_idle += 1
        self._policy.mark_idle(block, self._hits[block])
        self._offer(block)

    def evict(self, count: int) -> list[BlockId]:
        gone: list[BlockId] = []
        while len(gone) < count:
            block = self._first()
            if block is None:
                idle = (b for b, is_idle in enumerate(self._is_idle) if is_idle)
                gone += self.remove(min(idle, key=self._policy.rank))
            else:
                self._take_out(block)
                self._policy.on_evicted(block)
                gone.append(block)
        return gone

    def _first(self) -> BlockId | None:
        while self._heap:
            rank, block = heapq.heappop(self._heap)
            if self._may_go(block) and self._policy.rank(block) == rank:
                return block
        return None

    def remove(self, block: BlockId) -> list[BlockId]:
        top = self._keys[block]
        assert top is not None, "only what can be found is removed"
        order = [top]
        for key in order:
            order.extend(self._children.get(key, ()))
        idle: list[BlockId] = []
        for key in reversed(order):
            block = self._by_key[key]
            if self._is_idle[block]:
                idle.append(block)
            self._take_out(block)
        return idle

    def _take_out(self, block: BlockId) -> None:
        key, parent = self._keys[block], self._parents[block]
        assert key is not None
        assert parent is not None
        self._keys[block] = self._parents[block] = self._checksums[block] = None
        self._hits[block] = 0
        self._num_idle -= self._is_idle[block]
        self._is_idle[block] = False
        del self._by_key[key]
        siblings = self._children[parent]
        siblings.remove(key)
        if not siblings:
            del self._children[parent]
            before = self._by_key.get(parent)
            if before is not None:
                self._offer(before)
        self._on_removed(key)

    def _offer(self, block: BlockId) -> None:
        if not self._may_go(block):
            return
        heapq.heappush(self._heap, (self._policy.rank(block), block))
        if len(self._heap) > 2 * self._num_blocks + _SLACK:
            may_go = filter(self._may_go, self._by_key.values())
            self._heap = [(self._policy.rank(b), b) for b in may_go]
            heapq.heapify(self._heap)

    def _may_go(self, block: BlockId) -> bool:
        key = self._keys[block]
        return key is not None and bool(self._is_idle[block]) and key not in self._children

    def items(self) -> Iterator[tuple[BlockKey, BlockKey, BlockId]]:
        for key, block in self._by_key.items():
            parent = self._parents[block]
            assert parent is not None
            yield key, parent, block

    def by_age(self) -> list[BlockId]:
        idle = [block for block in self._by_key.values() if self._is_idle[block]]
        held = [block for block in self._by_key.values() if not self._is_idle[block]]
        return [*sorted(idle, key=self._policy.rank), *reversed(held)]

    def validate(self) -> None:
        for key, block in self._by_key.items():
            assert self._keys[block] == key
        assert sum(self._is_idle) == self._num_idle


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
        pool.count_hits(found)
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
