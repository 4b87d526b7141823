"""The blocks of one KV pool: who holds them, what they cache, which is evicted next.

Owns ids and bookkeeping, never bytes. Every block is in exactly one of three states: *blank* (free, holds nothing
findable), *cached* (unreferenced, findable by key, evictable) or *held* (referenced; findable too once published).

Eviction is least recently used and leaf first: a block goes before the block it extends, since a prefix without its
beginning cannot be matched. Does not know sequences, leases or requests; a reference is a reference.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from protocol.ids import BlockId
from protocol.keys import BlockKey

_HEAP_SLACK = 64  # stale heap entries tolerated beyond two per block before it is rebuilt


class BlockPool:
    """Allocation, sharing and prefix caching of `num_blocks` blocks. O(log num_blocks) per block and operation."""

    def __init__(
        self,
        num_blocks: int,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
        enable_prefix_caching: bool = True,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_added = on_added
        self._on_removed = on_removed
        self._caching = enable_prefix_caching
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: low ids are handed out first
        self._references = [0] * num_blocks
        self._num_held = 0
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents: list[BlockKey | None] = [None] * num_blocks
        self._checksums: list[int | None] = [None] * num_blocks
        self._by_key: dict[BlockKey, BlockId] = {}
        self._children: dict[BlockKey, set[BlockKey]] = {}  # cached children of a key
        self._clock = 0
        self._last_used = [0] * num_blocks
        # (last_used, block) of leaves that may be evicted; entries that no longer hold are skipped when popped
        self._leaves: list[tuple[int, BlockId]] = []

    def take_over(self, earlier: BlockPool) -> None:
        """Begins with what can be found in a pool over the same memory that nobody uses any more, whoever still seems
        to hold it; nothing may have been allocated here. Announces every block."""
        if self._num_held or self._by_key or self.num_blocks != earlier.num_blocks:
            raise ValueError("a pool takes over before anything is in it, and from one of its size")
        if not self._caching:
            return
        self._keys, self._parents = list(earlier._keys), list(earlier._parents)
        self._checksums, self._last_used = list(earlier._checksums), list(earlier._last_used)
        self._by_key, self._clock = dict(earlier._by_key), earlier._clock
        self._children = {key: set(children) for key, children in earlier._children.items()}
        self._blank = [block for block in self._blank if self._keys[block] is None]
        self._leaves = [
            (self._last_used[b], b) for b in self._by_key.values() if self._is_evictable(b)
        ]
        heapq.heapify(self._leaves)
        for key, parent in self.keys():
            self._on_added(key, parent)

    # -- what is there

    @property
    def num_held(self) -> int:
        """Referenced blocks."""
        return self._num_held

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, including cached ones that it would evict."""
        return self.num_blocks - self._num_held

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that still hold a findable prefix."""
        return self.num_free - len(self._blank)

    def keys(self) -> list[tuple[BlockKey, BlockKey]]:
        """(key, parent) of every findable block."""
        return [(key, self._parent_of(block)) for key, block in self._by_key.items()]

    def key_of(self, block: BlockId) -> BlockKey | None:
        """The key under which a block can be found."""
        return self._keys[block]

    def checksum_of(self, block: BlockId) -> int | None:
        """The checksum that was published with a findable block."""
        return self._checksums[block]

    def references_of(self, block: BlockId) -> int:
        return self._references[block]

    def match_prefix(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """The longest run of leading blocks that are findable. Takes no references: `retain` them before anything
        is allocated."""
        found: list[BlockId] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    # -- references

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each and nothing findable in them, or None (and no change) when there
        are fewer than that free."""
        if count > self.num_free:
            return None
        blocks = [self._take_blank() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of these held or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                if self._keys[block] is None:
                    raise ValueError(f"block {block} is blank and cannot be retained")
                self._num_held += 1
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each; give a sequence's blocks in order. Unreferenced blocks stay findable until
        they are evicted; those that never were findable become blank."""
        for block in reversed(blocks):  # the end of a sequence ages first
            if self._references[block] == 0:
                raise ValueError(f"block {block} is not held and cannot be released")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._let_go(block)

    # -- the prefix cache

    def publish(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int) -> None:
        """Makes a held block findable. No-op when the key already is, or when prefix caching is off."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held and cannot be published")
        if not self._caching or key in self._by_key:
            return
        if self._keys[block] is not None:
            raise ValueError(f"block {block} is already published under another key")
        self._keys[block], self._parents[block], self._checksums[block] = key, parent, checksum
        self._by_key[key] = block
        self._children.setdefault(parent, set()).add(key)
        self._on_added(key, parent)

    def forget(self, block: BlockId) -> None:
        """The content is bad: neither it nor what was computed from it can be found any more. Holders keep their
        references."""
        key = self._keys[block]
        if key is not None:
            self._forget_tree(key)

    def _forget_tree(self, root: BlockKey) -> None:
        order = [root]
        for key in order:
            order.extend(self._children.get(key, ()))
        for key in reversed(order):  # leaves first
            block = self._by_key[key]
            self._unpublish(block)
            if self._references[block] == 0:
                self._blank.append(block)

    def _unpublish(self, block: BlockId) -> None:
        key, parent = self._keys[block], self._parent_of(block)
        if key is None:
            raise ValueError(f"block {block} is not published")
        self._keys[block] = self._parents[block] = self._checksums[block] = None
        del self._by_key[key]
        siblings = self._children[parent]
        siblings.remove(key)
        if not siblings:
            del self._children[parent]
            self._offer(self._by_key.get(parent))
        self._on_removed(key)

    def _parent_of(self, block: BlockId) -> BlockKey:
        parent = self._parents[block]
        if parent is None:
            raise ValueError(f"block {block} is not published")
        return parent

    # -- eviction

    def _take_blank(self) -> BlockId:
        while not self._blank:
            self._evict_one()
        self._num_held += 1
        return self._blank.pop()

    def _evict_one(self) -> None:
        while self._leaves:
            last_used, block = heapq.heappop(self._leaves)
            if last_used == self._last_used[block] and self._is_evictable(block):
                self._unpublish(block)
                self._blank.append(block)
                return
        self._evict_branch()

    def _evict_branch(self) -> None:
        """Every unreferenced block is followed by a held one (its holder let the beginning go): the follower can no
        longer be found once its beginning goes, so it is forgotten with it."""
        candidates = (b for b, key in enumerate(self._keys) if key and not self._references[b])
        block = min(candidates, key=self._last_used.__getitem__)
        self.forget(block)

    def _let_go(self, block: BlockId) -> None:
        self._num_held -= 1
        self._clock += 1
        self._last_used[block] = self._clock
        if self._keys[block] is None:
            self._blank.append(block)
        else:
            self._offer(block)

    def _offer(self, block: BlockId | None) -> None:
        """Puts a block in line for eviction if it may be evicted now."""
        if block is None or not self._is_evictable(block):
            return
        if len(self._leaves) > 2 * self.num_blocks + _HEAP_SLACK:
            self._leaves = [
                (self._last_used[b], b) for b in self._by_key.values() if self._is_evictable(b)
            ]
            heapq.heapify(self._leaves)
        else:
            heapq.heappush(self._leaves, (self._last_used[block], block))

    def _is_evictable(self, block: BlockId) -> bool:
        key = self._keys[block]
        return key is not None and self._references[block] == 0 and key not in self._children

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once."""
        held = {b for b in range(self.num_blocks) if self._references[b] > 0}
        published = {b for b in range(self.num_blocks) if self._keys[b] is not None}
        blank = set(self._blank)
        cached = published - held
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & held, "a blank block is held"
        assert not blank & published, "a blank block is published"
        assert blank | held | cached == set(range(self.num_blocks)), "a block is lost"
        assert (self.num_held, self.num_cached) == (len(held), len(cached)), "counts drifted"
        assert all(count >= 0 for count in self._references), "negative references"
        self._validate_index(published)
        in_line = set(self._leaves)
        for block in cached:
            if self._is_evictable(block):
                assert (self._last_used[block], block) in in_line, f"leaf {block} is not in line"

    def _validate_index(self, published: set[BlockId]) -> None:
        assert set(self._by_key.values()) == published, "index and blocks disagree"
        children: dict[BlockKey, set[BlockKey]] = {}
        for key, block in self._by_key.items():
            assert self._keys[block] == key, f"block {block} is indexed under another key"
            children.setdefault(self._parent_of(block), set()).add(key)
        assert children == self._children, "children drifted"
