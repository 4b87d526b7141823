"""Baseline for the radix tree: one dict of keys, a set of children per block, and a heap of blocks to evict.

It is the block pool's former index and behaves like `engine.prefix.RadixTree`, whose tests compare the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.prefix.eviction import LeastRecentlyUsed, Rank
from engine.prefix.tree import MAX_HITS
from protocol.ids import BlockId
from protocol.keys import BlockKey

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

    def hold(self, block: BlockId) -> None:
        self._is_idle[block] = False
        self._num_idle -= 1

    def let_go(self, block: BlockId) -> None:
        self._is_idle[block] = True
        self._num_idle += 1
        self._policy.let_go(block, self._hits[block])
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
                self._policy.evicted(block)
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
