"""Block allocator of one KV pool: reference counts, blank blocks and the prefix cache.

Owns ids and bookkeeping, never bytes. Every block is in exactly one of three states: *blank* (free, holds nothing
findable), *cached* (unreferenced, findable by key, evictable) or *held* (referenced; also findable once published).

An allocation that is short of blank blocks *evicts* cached ones. If that is not enough it returns None, and the caller
either *waits* (`want` requests more memory where memory is elastic) or is *rejected* with `retry_after_s`. A share of
the blocks may be *reserved*: new requests that are not urgent leave it free.

The prefix index (`radix_tree.RadixTree`) decides what can be found and what is evicted next. A block is evicted before
the block it extends, since a prefix without its beginning cannot be matched. The pool does not know sequences, leases
or requests: all references are equal.
"""

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from moonserve.engine.kv_cache.eviction import DEFAULT_EVICTION, make_eviction
from moonserve.engine.kv_cache.pool_metrics import DurationHistogram, ReturnRate
from moonserve.engine.kv_cache.radix_tree import RadixTree
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import BlockId

TIMED_EVERY = 8
"""One allocation in this many is timed: reading the clock takes a third of a call."""


class FreeList:
    """Free list of a pool: a stack over fixed memory that hands out low ids first. `engine.kv_cache.paged_free_list` is
    the subclass for elastic memory.

    Blocks are taken to be held, and put back when their content is no longer needed. The list does not know the holders
    of taken blocks, nor what is cached in them.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks = array("I", range(num_blocks - 1, -1, -1))

    @property
    def num_ready(self) -> int:
        """Number of blocks that `take` can return now."""
        return len(self._blocks)

    @property
    def num_in_reach(self) -> int:
        """Number of ready blocks plus those that `prepare` could make ready, as far as is known."""
        return len(self._blocks)

    @property
    def capacity(self) -> int:
        """Number of blocks that can be taken at once under the current limits. A larger request never fits."""
        return self._num_blocks

    @property
    def is_reclaiming(self) -> bool:
        """True if `choose_reclaimed` has blocks to choose, or chosen blocks are not blank yet."""
        return False

    def prepare(self, count: int) -> None:
        """Makes `count` blocks ready to be taken, as far as that is possible without waiting."""

    def want(self, count: int) -> None:
        """Notes that a request waits for `count` blocks beyond those in reach."""

    def take(self, count: int) -> list[BlockId] | None:
        """Returns `count` blocks, or None if fewer are ready."""
        blocks = self._blocks
        if count > len(blocks):
            return None
        if count == 1:
            return [BlockId(blocks.pop())]
        taken = blocks[: -count - 1 : -1].tolist()
        del blocks[len(blocks) - count :]
        return taken

    def put(self, block: BlockId) -> None:
        self._blocks.append(block)

    def keep_only(self, taken: Collection[BlockId]) -> None:
        """Makes all blocks blank except `taken`, whatever was taken before."""
        blank = (b for b in range(self._num_blocks - 1, -1, -1) if b not in taken)
        self._blocks = array("I", blank)

    def choose_reclaimed(self, references: Sequence[int]) -> Collection[BlockId]:
        """Returns the blocks whose memory is to be given up: they must become blank and are then out of reach.
        `references`: reference count of each block."""
        return ()

    def __iter__(self) -> Iterator[BlockId]:
        """Iterates over every blank block, in reach or not."""
        return map(BlockId, self._blocks)


class BlockPool:
    """Allocation, sharing and prefix caching of `num_blocks` blocks. O(log num_blocks) per block and operation."""

    def __init__(
        self,
        num_blocks: int,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
        enable_prefix_caching: bool = True,
        eviction: str = DEFAULT_EVICTION,
        make_index: Callable[..., RadixTree] = RadixTree,
        free_list: FreeList | None = None,
        reserved_share: float = 0.0,
        zero: Callable[[Sequence[BlockId]], None] | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`eviction`: one of `eviction.EVICTION_NAMES`; ConfigError is raised for any other. `free_list`: the free
        list; None means fixed memory. `reserved_share`: share of the capacity that requests that are not urgent leave
        free. `zero`: clears blocks before they are handed out."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        if not 0.0 <= reserved_share < 1.0:
            raise ValueError(f"the reserved share must be from 0 to below 1, not {reserved_share}")
        self.num_blocks = num_blocks
        self.durations = DurationHistogram()
        self.num_allocated = self.num_evicted = self.num_refused = 0  # refused: calls, the others: blocks
        self._num_revived = 0  # cached blocks that became held again
        self._num_returned = 0
        self._reserved_share = reserved_share
        self._zero = zero
        self._clock_ns = clock_ns
        self._until_timed = TIMED_EVERY  # calls left
        self._turnover = ReturnRate()
        self._caching = enable_prefix_caching
        self._free_list = free_list or FreeList(num_blocks)
        self._take = self._free_list.take
        self._references = array("I", bytes(4 * num_blocks))
        self._index = make_index(
            num_blocks,
            make_eviction(eviction, num_blocks),
            on_added=on_added,
            on_removed=on_removed,
        )

    def adopt_cache(self, earlier: "BlockPool") -> None:
        """Takes over the findable blocks of `earlier`, an unused pool over the same memory. References that it still
        counts are ignored. Must be called before the first allocation here. Reports every block as added."""
        if self.num_held or len(self._index) or self.num_blocks != earlier.num_blocks:
            raise ValueError("only an empty pool can adopt the cache of another pool, of the same size")
        if not self._caching:
            self._free_list.keep_only(())
            return
        index, found = self._index, earlier._index
        for key, parent, block in found.items():
            checksum = found.checksum_of(block)
            assert checksum is not None, "what is listed can be found"
            index.add(block, key, parent, checksum, hits=found.hits_of(block))
        for block in found.by_age():
            index.mark_idle(block)
        self._free_list.keep_only({block for _, _, block in index.items()})

    # -- state

    @property
    def num_held(self) -> int:
        """Number of referenced blocks."""
        return self.num_allocated + self._num_revived - self._num_returned

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can hand out, including cached ones that it would evict. Blocks that have no
        memory now are neither free nor held."""
        return self._free_list.num_in_reach + self.num_cached

    @property
    def capacity(self) -> int:
        """Number of blocks that can ever be held at once under the current limits. A larger request never fits."""
        return self._free_list.capacity

    @property
    def num_reserved(self) -> int:
        """Number of blocks that requests that are not urgent leave free."""
        return math.ceil(self._reserved_share * self.capacity)

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks that still hold a findable prefix."""
        return self._index.num_idle

    def keys(self) -> list[tuple[BlockKey, BlockKey]]:
        """Returns (key, parent) of every findable block, parents first."""
        return [(key, parent) for key, parent, _ in self._index.items()]

    def key_of(self, block: BlockId) -> BlockKey | None:
        """Returns the key under which a block can be found, or None."""
        return self._index.key_of(block)

    def checksum_of(self, block: BlockId) -> int | None:
        """Returns the checksum that was published with a findable block, or None."""
        return self._index.checksum_of(block)

    def hits_of(self, block: BlockId) -> int:
        """Returns how often a findable block was reused since it was published, at most 255."""
        return self._index.hits_of(block)

    def references_of(self, block: BlockId) -> int:
        return self._references[block]

    @property
    def references(self) -> Sequence[int]:
        """Live, read-only view of the reference count of each block."""
        return self._references

    def match_prefix(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Returns the longest run of leading blocks of a key chain that are findable. Takes no references: the caller
        must `retain` the blocks before anything is allocated."""
        return self._index.match(keys)

    # -- references

    def allocate(self, count: int, *, leave_reserve: bool = False) -> list[BlockId] | None:
        """Returns `count` blocks with one reference each and nothing findable in them. Returns None, without any
        change, if fewer are free, not counting the reserve if `leave_reserve`."""
        self._until_timed -= 1
        if self._until_timed == 0:
            return self._allocate_timed(count, leave_reserve)
        if leave_reserve and count + self.num_reserved > self.num_free:
            self.num_refused += 1
            return None
        blocks = self._take(count)
        if blocks is None:
            blocks = self._evict(count)
            if blocks is None:
                self.num_refused += 1
                return None
        references = self._references
        for block in blocks:
            references[block] = 1
        self.num_allocated += count
        if self._zero is not None:
            self._zero(blocks)
        return blocks

    def _allocate_timed(self, count: int, leave_reserve: bool) -> list[BlockId] | None:
        begun = self._clock_ns()
        blocks = self.allocate(count, leave_reserve=leave_reserve)
        self.durations.add(self._clock_ns() - begun)
        self._until_timed = TIMED_EVERY
        return blocks

    def _evict(self, count: int) -> list[BlockId] | None:
        """Takes `count` blocks after making more ready: from new memory first, then by evicting cached blocks."""
        free_list = self._free_list
        self.reclaim()  # so that no block evicted below is one whose memory is given up
        free_list.prepare(count)
        missing = count - free_list.num_ready
        if missing > self._index.num_idle:
            free_list.want(missing)
            return None
        if missing > 0:
            self.num_evicted += missing
            for block in reversed(self._index.evict(missing)):
                free_list.put(block)
        return self._take(count)

    def retry_after_s(self, now: float, count: int) -> float:
        """Returns the seconds until `count` blocks may be free, from the recent rate at which blocks are returned."""
        missing = max(count - self.num_free, 1)
        return self._turnover.retry_after_s(now, self._num_returned, missing)

    def count_hits(self, blocks: Iterable[BlockId]) -> None:
        """Counts a cache hit for findable blocks whose holder does not have to compute them."""
        self._index.hit(blocks)

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each of these held or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._index.is_findable(block):
                    raise ValueError(f"block {block} is blank and cannot be retained")
                self._num_revived += 1
                self._index.mark_held(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops one reference from each block. `blocks` must be in sequence order. Findable blocks without references
        stay cached until they are evicted; other blocks become blank."""
        for block in reversed(blocks):  # so that the end of a sequence is evicted first
            if self._references[block] == 0:
                raise ValueError(f"block {block} is not held and cannot be released")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._return_block(block)

    def _return_block(self, block: BlockId) -> None:
        self._num_returned += 1
        if self._index.is_findable(block):
            self._index.mark_idle(block)
        else:
            self._free_list.put(block)

    # -- elastic memory

    def want(self, count: int) -> None:
        """Notes that a request waits for `count` blocks beyond those that are free."""
        self._free_list.want(count)

    def reclaim(self) -> set[BlockId]:
        """Removes from the prefix cache the blocks whose memory is to be given up. Returns those that are held: their
        holders should release them as soon as possible."""
        if not self._free_list.is_reclaiming:
            return set()
        leaving = self._free_list.choose_reclaimed(self._references)
        for block in leaving:
            self.uncache(block)
        return {block for block in leaving if self._references[block]}

    # -- the prefix cache

    def publish(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int) -> None:
        """Makes a held block findable. Does nothing if the key already is findable or if prefix caching is off."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held and cannot be published")
        if self._caching:
            self._index.add(block, key, parent, checksum)

    def uncache(self, block: BlockId) -> None:
        """Removes a block, and all blocks that extend it, from the prefix cache, for example because its content is
        corrupt. Holders keep their references."""
        if self._index.is_findable(block):
            for each in self._index.remove(block):
                self._free_list.put(each)

    # -- validation

    def validate(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once."""
        blocks = range(self.num_blocks)
        held = {b for b in blocks if self._references[b] > 0}
        published = {b for b in blocks if self._index.is_findable(b)}
        free_list = list(self._free_list)
        blank = set(free_list)
        assert len(blank) == len(free_list), "a block is blank twice"
        assert not blank & held, "a blank block is held"
        assert not blank & published, "a blank block is published"
        assert blank | held | published == set(blocks), "a block is lost"
        assert self.num_held == len(held), "held blocks drifted"
        assert self.num_cached == len(published - held), "cached blocks drifted"
        self._index.validate()
