"""The prefix index of a block pool as a radix tree over block keys.

A node is a run of blocks without a branch (path compression): a prompt is compared with a run's keys as bytes. A run is
split where a prompt diverges. Deletion is lazy: eviction takes blocks off the ends of runs, as many in a row as are
next in order; a run that is left with one child is only joined with it once there are many of those.

Since keys are chained, any of them leads to its place at once, through a dict: nothing has to come down from a root.
(An open-addressing table instead of the dict halves the memory and takes twice the time: docs/engine-performance.md.)
There is a root for each parent that runs have and the tree has not: NO_PARENT, or a block that is published later or
never.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from engine.prefix.eviction import LeastRecentlyUsed, Rank
from engine.prefix.run import Run
from protocol.ids import BlockId
from protocol.keys import KEY_BYTES, BlockKey

SLACK = 64
MAX_HITS = 255
"""What a byte counts."""


class RadixTree:
    """The findable blocks of a pool of `num_blocks`. It tells its owner of every block that becomes findable or ceases
    to be. The pool counts references, and tells it when a block's first one comes and its last one goes: a findable
    block that nobody holds is *idle*."""

    def __init__(
        self,
        num_blocks: int,
        policy: LeastRecentlyUsed,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
        slack: int = SLACK,
    ) -> None:
        """`slack`: stale entries of the line, and runs to be joined, that are tolerated whatever their share."""
        self._slack = slack
        self._policy = policy
        self._on_added = on_added
        self._on_removed = on_removed
        self._by_key: dict[BlockKey, BlockId] = {}
        self._roots: dict[BlockKey, Run] = {}  # without blocks, by the parent of their children
        self._runs: list[Run | None] = [None] * num_blocks  # by block
        # Of findable blocks: their offset in their run plus what the run's first block counts as.
        self._depths = array("I", bytes(4 * num_blocks))
        # No array of words: in a pipeline group each stage has a checksum of its own, and they are joined.
        self._checksums: list[int | None] = [None] * num_blocks
        self._hits = bytearray(num_blocks)
        self._is_idle = bytearray(num_blocks)
        self._num_idle = 0
        self._num_runs = 0
        self._joinable: set[Run] = set()  # with exactly one child
        # (rank, block) of blocks that may go; entries that no longer hold are skipped when their turn comes
        self._line: list[tuple[Rank, BlockId]] = []

    def __len__(self) -> int:
        """Findable blocks."""
        return len(self._by_key)

    @property
    def num_idle(self) -> int:
        return self._num_idle

    def is_findable(self, block: BlockId) -> bool:
        return self._runs[block] is not None

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The longest run of leading blocks that are findable; `keys` is a chain."""
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
        """How often it was found since it was added, up to MAX_HITS; 0 when it is not findable."""
        return self._hits[block]

    def hit(self, blocks: Iterable[BlockId]) -> None:
        """These findable blocks were found by a request that uses them."""
        hits = self._hits
        for block in blocks:
            if hits[block] < MAX_HITS:
                hits[block] += 1

    def items(self) -> Iterator[tuple[BlockKey, BlockKey, BlockId]]:
        """(key, parent, block) of every findable block, parents first."""
        for run in self._all_runs():
            parent = _parent_key(run)
            for offset, block in enumerate(run.blocks):
                key = run.key_at(offset)
                yield key, parent, block
                parent = key

    def by_age(self) -> list[BlockId]:
        """Every findable block: idle ones, what would go first first, then held ones, ends of chains first."""
        blocks = [block for _, _, block in self.items()]
        held = [block for block in blocks if not self._is_idle[block]]
        idle = [block for block in blocks if self._is_idle[block]]
        return [*sorted(idle, key=self._policy.rank), *reversed(held)]

    def _all_runs(self) -> Iterator[Run]:
        """Parents first."""
        for root in self._roots.values():
            for child in root.children:
                yield from _subtree(child)

    def _place(self, block: BlockId) -> tuple[Run, int]:
        run = self._runs[block]
        if run is None:
            raise ValueError(f"block {block} cannot be found")
        return run, self._depths[block] - run.first

    # -- growth

    def add(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int, *, hits: int = 0) -> bool:
        """Makes a held block findable. False and no change when the key is findable already. Its parent may come later
        or never; NO_PARENT never comes. Raises ValueError when the block can be found under another key."""
        if key in self._by_key:
            return False
        if self._runs[block] is not None:
            raise ValueError(f"block {block} is already published under another key")
        run = self._run_behind(parent)
        self._depths[block] = run.end
        run.append(key, block)
        self._by_key[key] = block
        self._runs[block], self._checksums[block], self._hits[block] = run, checksum, hits
        if key in self._roots:
            self._bring_together(run, self._roots.pop(key))
        self._on_added(key, parent)
        return True

    def _bring_together(self, run: Run, root: Run) -> None:
        """What waited for the block at the end of `run` follows it."""
        for child in root.children:
            run.adopt(child)
        if len(run.children) == 1:
            self._joinable.add(run)

    def _run_behind(self, parent: BlockKey) -> Run:
        """The run, perhaps a new one, whose end a child of `parent` is to become."""
        before = self._by_key.get(parent)
        if before is None:
            run = self._root_of(parent)
        else:
            run, offset = self._place(before)
            if offset + 1 < len(run):
                self._split(run, offset + 1)
            elif not run.children:
                return run
        child = Run(run, run.end)
        run.adopt(child)
        self._joinable.discard(run)
        self._num_runs += 1
        return child

    def _root_of(self, parent: BlockKey) -> Run:
        if parent not in self._roots:
            self._roots[parent] = Run(None, 0)
            self._roots[parent].keys += parent
        return self._roots[parent]

    def _split(self, run: Run, offset: int) -> None:
        was_joinable = run in self._joinable
        rest = run.split(offset)
        self._num_runs += 1
        for block in rest.blocks:
            self._runs[block] = rest
        if was_joinable:
            self._joinable.add(rest)
        self._joinable.add(run)

    # -- use

    def hold(self, block: BlockId) -> None:
        """A findable block that was idle is not any more."""
        self._is_idle[block] = False
        self._num_idle -= 1

    def let_go(self, block: BlockId) -> None:
        """A findable block that was held is idle from now on, and was used until now."""
        self._is_idle[block] = True
        self._num_idle += 1
        self._policy.let_go(block, self._hits[block])
        run, offset = self._place(block)
        if offset + 1 == len(run.blocks) and not run.children:
            self._line_up(block)

    def _line_up(self, block: BlockId) -> None:
        """An idle block that none extends is put in line."""
        if len(self._line) <= 2 * self._num_runs + self._slack:
            heapq.heappush(self._line, (self._policy.rank(block), block))
            return
        self._line = [(self._policy.rank(last), last) for last in self._idle_ends()]
        heapq.heapify(self._line)

    def _idle_ends(self) -> Iterator[BlockId]:
        for run in self._all_runs():
            if not run.children and self._is_idle[run.blocks[-1]]:
                yield run.blocks[-1]

    # -- eviction

    def evict(self, count: int) -> list[BlockId]:
        """Takes at least `count` idle blocks out, of which there are so many. A block goes before the block it
        extends; where that one is held, it is taken out along with it but not among those returned."""
        gone: list[BlockId] = []
        while len(gone) < count:
            run = self._next_in_line()
            if run is None:
                gone += self.remove(self._oldest())
            else:
                self._shorten(run, count, gone)
        self._join()
        return gone

    def _next_in_line(self) -> Run | None:
        """The run whose end goes next, if there is one."""
        while self._line:
            rank, block = heapq.heappop(self._line)
            run = self._runs[block]
            if run is None or run.children or run.blocks[-1] != block:
                continue
            if self._is_idle[block] and self._policy.rank(block) == rank:
                return run
        return None

    def _shorten(self, run: Run, count: int, gone: list[BlockId]) -> None:
        """Takes its last block off, and more while they are next in order and fewer than `count` are gone."""
        line, rank_of, is_idle = self._line, self._policy.rank, self._is_idle
        while True:
            block = self._take_off(run)
            self._policy.evicted(block)
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
        """What goes where every idle block is followed by a held one (its holder let the beginning go): the follower
        can no longer be found once its beginning goes, so it is taken out with it."""
        idle = (block for block, is_idle in enumerate(self._is_idle) if is_idle)
        return min(idle, key=self._policy.rank)

    def remove(self, block: BlockId) -> list[BlockId]:
        """Takes a findable block and all that extend it out; returns the idle ones of them."""
        top, offset = self._place(block)
        idle: list[BlockId] = []
        for run in reversed([top, *(below for c in top.children for below in _subtree(c))]):
            keep = offset if run is top else 0
            while len(run) > keep:
                last = run.blocks[-1]
                if self._is_idle[last]:
                    idle.append(last)
                self._take_off(run)
            if run is not top:
                self._unlink(run)
        if not top.blocks:
            self._unlink(top)
        else:
            self._ends_now(top)
        self._join()
        return idle

    def _take_off(self, run: Run) -> BlockId:
        key, block = run.pop()
        del self._by_key[key]
        self._runs[block] = self._checksums[block] = None
        self._hits[block] = 0
        if self._is_idle[block]:
            self._is_idle[block] = False
            self._num_idle -= 1
        self._on_removed(key)
        return block

    def _ends_now(self, run: Run) -> None:
        """Nothing extends the run any more."""
        self._joinable.discard(run)
        if self._is_idle[run.blocks[-1]]:
            self._line_up(run.blocks[-1])

    def _unlink(self, run: Run) -> None:
        """The run has no blocks and no children left."""
        parent = run.parent
        assert parent is not None, "a root is not unlinked"
        parent.disown(run)
        self._joinable.discard(run)
        self._num_runs -= 1
        if not parent.blocks:
            if not parent.children:
                del self._roots[BlockKey(bytes(parent.keys))]
        elif not parent.children:
            self._ends_now(parent)
        elif len(parent.children) == 1:
            self._joinable.add(parent)

    def _join(self) -> None:
        """Makes one run of each that has a single child, and that child, once there are many."""
        if 4 * len(self._joinable) <= self._num_runs + 4 * self._slack:
            return
        while self._joinable:
            run = self._joinable.pop()
            (child,) = run.children
            for depth, block in enumerate(child.blocks, run.end):
                self._runs[block], self._depths[block] = run, depth
            run.absorb(child)
            self._num_runs -= 1
            if child in self._joinable:
                self._joinable.remove(child)
                self._joinable.add(run)

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError when the bookkeeping is broken. O(n)."""
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
        in_line = set(self._line)
        for block in self._idle_ends():
            assert (self._policy.rank(block), block) in in_line, f"block {block} is not in line"

    def _validate_run(self, run: Run) -> None:
        assert len(run), "a run without blocks"
        assert run.parent is not None, "a run outside the tree"
        assert run in run.parent.children, "a run is not its parent's child"
        for offset, block in enumerate(run.blocks):
            assert self._place(block) == (run, offset), f"block {block} lies elsewhere"
            assert self._by_key[run.key_at(offset)] == block, f"block {block} is not found"


def _subtree(top: Run) -> Iterator[Run]:
    """`top` and all below it, parents first."""
    waiting = [top]
    while waiting:
        run = waiting.pop()
        yield run
        waiting.extend(run.children)


def _parent_key(run: Run) -> BlockKey:
    """Of its first block."""
    assert run.parent is not None, "a root has no parent"
    return BlockKey(bytes(run.parent.keys[-KEY_BYTES:]))
