"""Prefix index of a block pool: a radix tree over block keys.

A node is a run of blocks without a branch (path compression); a prompt is compared with a run's keys as bytes. A run is
split where a prompt diverges. Eviction removes blocks from the ends of runs, several in a row if they are next in
order. Runs that are left with one child are joined with it lazily, once there are many of them.

Since keys are chained, a dict leads from any key directly to its place, without a descent from a root. (An
open-addressing table instead of the dict halves the memory and doubles the time: docs/engine-performance.md.) There is
one root for each parent key that is not in the tree: NO_PARENT, or a block that is published later or never.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from moonserve.engine.kv_cache.eviction import LeastRecentlyUsed, Rank
from moonserve.engine.kv_cache.radix_node import RadixNode
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.protocol.request import BlockId

SLACK = 64
MAX_HITS = 255
"""Hit counts are stored in one byte."""


class RadixTree:
    """Findable blocks of a pool of `num_blocks`. Its callbacks report every block that becomes findable or ceases to
    be. The pool counts references and reports a block's first and last one: a findable block without references is
    *idle*."""

    def __init__(
        self,
        num_blocks: int,
        policy: LeastRecentlyUsed,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
        slack: int = SLACK,
    ) -> None:
        """`slack`: number of stale queue entries, and of joinable runs, that is tolerated whatever their share."""
        self._slack = slack
        self._policy = policy
        self._on_added = on_added
        self._on_removed = on_removed
        self._by_key: dict[BlockKey, BlockId] = {}
        self._roots: dict[BlockKey, RadixNode] = {}  # runs without blocks, by the parent key of their children
        self._runs: list[RadixNode | None] = [None] * num_blocks  # by block
        # Offset of each findable block in its run, plus the run's `first`.
        self._depths = array("I", bytes(4 * num_blocks))
        # A list, since a pipeline group joins the checksums of its stages to one integer of more than 64 bits.
        self._checksums: list[int | None] = [None] * num_blocks
        self._hits = bytearray(num_blocks)
        self._is_idle = bytearray(num_blocks)
        self._num_idle = 0
        self._num_runs = 0
        self._joinable: set[RadixNode] = set()  # runs with exactly one child
        # Eviction queue: (rank, block) of idle ends of runs. Stale entries are skipped when they are popped.
        self._queue: list[tuple[Rank, BlockId]] = []

    def __len__(self) -> int:
        """Returns the number of findable blocks."""
        return len(self._by_key)

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def is_findable(self, block: BlockId) -> bool:
        return self._runs[block] is not None

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Returns the longest run of leading findable blocks of the chain `keys`."""
        found: list[BlockId] = []
        packed = b"".join(keys)
        while len(found) < len(keys):
            block = self._by_key.get(keys[len(found)])
            if block is None:
                break
            run, offset = self._place(block)
            common = run.common(offset, packed, len(found))
            found += run.blocks[offset : offset + common]
            if offset + common < len(run.blocks):
                break
        return found

    def key_of(self, block: BlockId) -> BlockKey | None:
        run = self._runs[block]
        return None if run is None else run.key_at(self._depths[block] - run.first)

    def checksum_of(self, block: BlockId) -> int | None:
        return self._checksums[block]

    def hits_of(self, block: BlockId) -> int:
        """Returns the block's cache hits since it was added, up to MAX_HITS; 0 if it is not findable."""
        return self._hits[block]

    def hit(self, blocks: Iterable[BlockId]) -> None:
        """Counts a cache hit for each of these findable blocks."""
        hits = self._hits
        for block in blocks:
            if hits[block] < MAX_HITS:
                hits[block] += 1

    def items(self) -> Iterator[tuple[BlockKey, BlockKey, BlockId]]:
        """Yields (key, parent, block) of every findable block, parents first."""
        for run in self._all_runs():
            parent = _parent_key(run)
            for offset, block in enumerate(run.blocks):
                key = run.key_at(offset)
                yield key, parent, block
                parent = key

    def by_age(self) -> list[BlockId]:
        """Returns all findable blocks: idle blocks in eviction order, then held blocks, ends of chains first."""
        blocks = [block for _, _, block in self.items()]
        held = [block for block in blocks if not self._is_idle[block]]
        idle = [block for block in blocks if self._is_idle[block]]
        return [*sorted(idle, key=self._policy.rank), *reversed(held)]

    def _all_runs(self) -> Iterator[RadixNode]:
        """Yields all runs with blocks, parents first."""
        for root in self._roots.values():
            for child in root.children:
                yield from _subtree(child)

    def _place(self, block: BlockId) -> tuple[RadixNode, int]:
        run = self._runs[block]
        if run is None:
            raise ValueError(f"block {block} cannot be found")
        return run, self._depths[block] - run.first

    # -- insertion

    def add(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int, *, hits: int = 0) -> bool:
        """Makes a held block findable. Returns False, without any change, if the key already is findable. The parent
        may be added later or never; NO_PARENT never is. Raises ValueError if the block has another key."""
        if key in self._by_key:
            return False
        if self._runs[block] is not None:
            raise ValueError(f"block {block} is already published under another key")
        run = self._run_for_child_of(parent)
        self._depths[block] = run.end
        run.append(key, block)
        self._by_key[key] = block
        self._runs[block], self._checksums[block], self._hits[block] = run, checksum, hits
        if key in self._roots:
            self._adopt_waiting(run, self._roots.pop(key))
        self._on_added(key, parent)
        return True

    def _adopt_waiting(self, run: RadixNode, root: RadixNode) -> None:
        """Moves the children of `root`, which waited for the last block of `run`, to `run`."""
        for child in root.children:
            run.add_child(child)
        if len(run.children) == 1:
            self._joinable.add(run)

    def _run_for_child_of(self, parent: BlockKey) -> RadixNode:
        """Returns the run to which a child of `parent` is to be appended, creating or splitting runs as needed."""
        before = self._by_key.get(parent)
        if before is None:
            run = self._root_of(parent)
        else:
            run, offset = self._place(before)
            if offset + 1 < len(run):
                self._split(run, offset + 1)
            elif not run.children:
                return run
        child = RadixNode(run, run.end)
        run.add_child(child)
        self._joinable.discard(run)
        self._num_runs += 1
        return child

    def _root_of(self, parent: BlockKey) -> RadixNode:
        if parent not in self._roots:
            self._roots[parent] = RadixNode(None, 0)
            self._roots[parent].keys += parent
        return self._roots[parent]

    def _split(self, run: RadixNode, offset: int) -> None:
        was_joinable = run in self._joinable
        rest = run.split(offset)
        self._num_runs += 1
        for block in rest.blocks:
            self._runs[block] = rest
        if was_joinable:
            self._joinable.add(rest)
        self._joinable.add(run)

    # -- use

    def mark_held(self, block: BlockId) -> None:
        """Marks an idle block as held."""
        self._is_idle[block] = False
        self._num_idle -= 1

    def mark_idle(self, block: BlockId) -> None:
        """Marks a held findable block as idle, last used now."""
        self._is_idle[block] = True
        self._num_idle += 1
        self._policy.mark_idle(block, self._hits[block])
        run, offset = self._place(block)
        if offset + 1 == len(run.blocks) and not run.children:
            self._enqueue(block)

    def _enqueue(self, block: BlockId) -> None:
        """Adds an idle block that no other block extends to the eviction queue."""
        if len(self._queue) <= 2 * self._num_runs + self._slack:
            heapq.heappush(self._queue, (self._policy.rank(block), block))
            return
        self._queue = [(self._policy.rank(last), last) for last in self._idle_ends()]
        heapq.heapify(self._queue)

    def _idle_ends(self) -> Iterator[BlockId]:
        for run in self._all_runs():
            if not run.children and self._is_idle[run.blocks[-1]]:
                yield run.blocks[-1]

    # -- eviction

    def evict(self, count: int) -> list[BlockId]:
        """Removes and returns at least `count` idle blocks, which must exist. A block goes before the block it extends.
        A held block that extends an evicted one is removed from the tree too, but not returned."""
        gone: list[BlockId] = []
        while len(gone) < count:
            run = self._next_to_evict()
            if run is None:
                gone += self.remove(self._oldest())
            else:
                self._shorten(run, count, gone)
        self._join()
        return gone

    def _next_to_evict(self) -> RadixNode | None:
        """Returns the run whose last block is evicted next, or None if no run ends in an idle block."""
        while self._queue:
            rank, block = heapq.heappop(self._queue)
            run = self._runs[block]
            if run is None or run.children or run.blocks[-1] != block:
                continue
            if self._is_idle[block] and self._policy.rank(block) == rank:
                return run
        return None

    def _shorten(self, run: RadixNode, count: int, gone: list[BlockId]) -> None:
        """Removes the run's last block, and more blocks while they are next in order and `count` is not reached."""
        line, rank_of, is_idle = self._queue, self._policy.rank, self._is_idle
        while True:
            block = self._remove_last(run)
            self._policy.on_evicted(block)
            gone.append(block)
            if not run.blocks:
                self._unlink(run)
                return
            if not is_idle[run.blocks[-1]]:
                return
            rank = rank_of(run.blocks[-1])
            if len(gone) >= count or (line and line[0][0] < rank):
                heapq.heappush(line, (rank, run.blocks[-1]))
                return

    def _oldest(self) -> BlockId:
        """Returns the idle block to evict if every idle block is followed by a held one, whose holder released only
        the beginning. The follower is removed too, since it cannot be found without its beginning."""
        idle = (block for block, is_idle in enumerate(self._is_idle) if is_idle)
        return min(idle, key=self._policy.rank)

    def remove(self, block: BlockId) -> list[BlockId]:
        """Removes a findable block and all blocks that extend it; returns the idle ones among them."""
        top, offset = self._place(block)
        idle: list[BlockId] = []
        for run in reversed([top, *(below for c in top.children for below in _subtree(c))]):
            keep = offset if run is top else 0
            while len(run) > keep:
                last = run.blocks[-1]
                if self._is_idle[last]:
                    idle.append(last)
                self._remove_last(run)
            if run is not top:
                self._unlink(run)
        if not top.blocks:
            self._unlink(top)
        else:
            self._lost_last_child(top)
        self._join()
        return idle

    def _remove_last(self, run: RadixNode) -> BlockId:
        key, block = run.pop()
        del self._by_key[key]
        self._runs[block] = self._checksums[block] = None
        self._hits[block] = 0
        if self._is_idle[block]:
            self._is_idle[block] = False
            self._num_idle -= 1
        self._on_removed(key)
        return block

    def _lost_last_child(self, run: RadixNode) -> None:
        """Updates a run that has lost its last child."""
        self._joinable.discard(run)
        if self._is_idle[run.blocks[-1]]:
            self._enqueue(run.blocks[-1])

    def _unlink(self, run: RadixNode) -> None:
        """Removes a run without blocks and children from its parent."""
        parent = run.parent
        assert parent is not None, "a root is not unlinked"
        parent.remove_child(run)
        self._joinable.discard(run)
        self._num_runs -= 1
        if not parent.blocks:
            if not parent.children:
                del self._roots[BlockKey(bytes(parent.keys))]
        elif not parent.children:
            self._lost_last_child(parent)
        elif len(parent.children) == 1:
            self._joinable.add(parent)

    def _join(self) -> None:
        """Joins each run that has a single child with that child, once there are many such runs."""
        if 4 * len(self._joinable) <= self._num_runs + 4 * self._slack:
            return
        while self._joinable:
            run = self._joinable.pop()
            (child,) = run.children
            for depth, block in enumerate(child.blocks, run.end):
                self._runs[block], self._depths[block] = run, depth
            run.merge_child(child)
            self._num_runs -= 1
            if child in self._joinable:
                self._joinable.remove(child)
                self._joinable.add(run)

    # -- validation

    def validate(self) -> None:
        """Raises AssertionError if the state is inconsistent. O(n)."""
        runs = list(self._all_runs())
        assert len(runs) == self._num_runs, "runs are lost"
        assert not self._roots.keys() & self._by_key.keys(), "a run waits for what is there"
        for parent, root in self._roots.items():
            assert root.children, "a root without children"
            assert not root.blocks, "a root has blocks"
            assert bytes(root.keys) == parent, "a root is another's"
        for run in runs:
            self._validate_run(run)
        findable = {block for run in runs for block in run.blocks}
        assert len(findable) == sum(map(len, runs)) == len(self), "a block is there twice"
        assert {b for b, run in enumerate(self._runs) if run is not None} == findable
        idle = {b for b, is_idle in enumerate(self._is_idle) if is_idle}
        assert idle <= findable, "an idle block cannot be found"
        assert len(idle) == self._num_idle, "idle blocks drifted"
        assert {b for b, checksum in enumerate(self._checksums) if checksum is not None} == findable
        assert {b for b, hits in enumerate(self._hits) if hits} <= findable
        assert self._joinable == {run for run in runs if len(run.children) == 1}
        in_line = set(self._queue)
        for block in self._idle_ends():
            assert (self._policy.rank(block), block) in in_line, f"block {block} is not in line"

    def _validate_run(self, run: RadixNode) -> None:
        assert len(run), "a run without blocks"
        assert run.parent is not None, "a run outside the tree"
        assert run in run.parent.children, "a run is not its parent's child"
        for offset, block in enumerate(run.blocks):
            assert self._place(block) == (run, offset), f"block {block} lies elsewhere"
            assert self._by_key[run.key_at(offset)] == block, f"block {block} is not found"


def _subtree(top: RadixNode) -> Iterator[RadixNode]:
    """Yields `top` and all runs below it, parents first."""
    waiting = [top]
    while waiting:
        run = waiting.pop()
        yield run
        waiting.extend(run.children)


def _parent_key(run: RadixNode) -> BlockKey:
    """Returns the parent key of the run's first block."""
    assert run.parent is not None, "a root has no parent"
    return BlockKey(bytes(run.parent.keys[-KEY_BYTES:]))
