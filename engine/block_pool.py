"""The blocks of one KV pool: who holds them, which are blank, and what can be found again.

Owns ids and bookkeeping, never bytes. Every block is in exactly one of three states: *blank* (free, holds nothing
findable), *cached* (unreferenced, findable by key, evictable) or *held* (referenced; findable too once published).

What can be found, and what is evicted next, is the prefix index's business (`engine.prefix`): a block goes before the
block it extends, since a prefix without its beginning cannot be matched. Does not know sequences, leases or requests; a
reference is a reference.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from engine.blanks import Blanks, Stack
from engine.prefix import DEFAULT_EVICTION, PrefixIndex, RadixTree, make_eviction
from protocol.ids import BlockId
from protocol.keys import BlockKey


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
        make_index: Callable[..., PrefixIndex] = RadixTree,
        blanks: Blanks | None = None,
    ) -> None:
        """`eviction`: one of `engine.prefix.EVICTION_NAMES`. Raises ConfigError for another. `blanks`: where blank
        blocks come from; None: all are there."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._caching = enable_prefix_caching
        self._blanks: Blanks = blanks or Stack(num_blocks)
        self._references = array("I", bytes(4 * num_blocks))
        self._num_held = 0
        self._index = make_index(
            num_blocks,
            make_eviction(eviction, num_blocks),
            on_added=on_added,
            on_removed=on_removed,
        )

    def take_over(self, earlier: BlockPool) -> None:
        """Begins with what can be found in a pool over the same memory that nobody uses any more, whoever still seems
        to hold it; nothing may have been allocated here. Announces every block."""
        if self._num_held or len(self._index) or self.num_blocks != earlier.num_blocks:
            raise ValueError("a pool takes over before anything is in it, and from one of its size")
        if not self._caching:
            self._blanks.keep_only(())
            return
        index, found = self._index, earlier._index
        for key, parent, block in found.items():
            checksum = found.checksum_of(block)
            assert checksum is not None, "what is listed can be found"
            index.add(block, key, parent, checksum, hits=found.hits_of(block))
        for block in found.by_age():
            index.let_go(block)
        self._blanks.keep_only({block for _, _, block in index.items()})

    # -- what is there

    @property
    def num_held(self) -> int:
        """Referenced blocks."""
        return self._num_held

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, including cached ones that it would evict. What there is no memory for
        now is neither free nor held."""
        return self._blanks.num_in_reach + self.num_cached

    @property
    def capacity(self) -> int:
        """Blocks that can ever be held at once, as limits are now; what needs more never fits."""
        return self._blanks.capacity

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that still hold a findable prefix."""
        return self._index.num_idle

    def keys(self) -> list[tuple[BlockKey, BlockKey]]:
        """(key, parent) of every findable block, parents first."""
        return [(key, parent) for key, parent, _ in self._index.items()]

    def key_of(self, block: BlockId) -> BlockKey | None:
        """The key under which a block can be found."""
        return self._index.key_of(block)

    def checksum_of(self, block: BlockId) -> int | None:
        """The checksum that was published with a findable block."""
        return self._index.checksum_of(block)

    def hits_of(self, block: BlockId) -> int:
        """How often a findable block was re-used since it was published; counted up to 255."""
        return self._index.hits_of(block)

    def references_of(self, block: BlockId) -> int:
        return self._references[block]

    @property
    def references(self) -> Sequence[int]:
        """Of each block; to look at, as it changes."""
        return self._references

    def match_prefix(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """The longest run of leading blocks of a chain that are findable. Takes no references: `retain` them before
        anything is allocated."""
        return self._index.match(keys)

    # -- references

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks with one reference each and nothing findable in them, or None (and no change) when there
        are fewer than that free."""
        blanks = self._blanks
        if count > blanks.num_ready:
            self.make_way()  # what is evicted below is not among what leaves
            blanks.prepare(count)
            missing = count - blanks.num_ready
            if missing > self._index.num_idle:
                blanks.want(missing)
                return None
            if missing > 0:
                for block in reversed(self._index.evict(missing)):
                    blanks.put(block)
        blocks = blanks.take(count)
        for block in blocks:
            self._references[block] = 1
        self._num_held += count
        return blocks

    def reused(self, blocks: Iterable[BlockId]) -> None:
        """Somebody who holds these findable blocks found them and saves computing them: worth keeping."""
        self._index.hit(blocks)

    def retain(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of these held or cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._index.is_findable(block):
                    raise ValueError(f"block {block} is blank and cannot be retained")
                self._num_held += 1
                self._index.hold(block)
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

    def _let_go(self, block: BlockId) -> None:
        self._num_held -= 1
        if self._index.is_findable(block):
            self._index.let_go(block)
        else:
            self._blanks.put(block)

    # -- memory that comes and goes

    def want(self, count: int) -> None:
        """Somebody waits for so many blocks beyond what is free."""
        self._blanks.want(count)

    def make_way(self) -> set[BlockId]:
        """Gives up what can be found in blocks that are to leave, since there is less memory. Returns those that are
        held: their holders should let go of them as soon as they can."""
        if not self._blanks.is_leaving:
            return set()
        leaving = self._blanks.choose_leaving(self._references)
        for block in leaving:
            self.forget(block)
        return {block for block in leaving if self._references[block]}

    # -- the prefix cache

    def publish(self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int) -> None:
        """Makes a held block findable. No-op when the key already is, or when prefix caching is off."""
        if self._references[block] == 0:
            raise ValueError(f"block {block} is not held and cannot be published")
        if self._caching:
            self._index.add(block, key, parent, checksum)

    def forget(self, block: BlockId) -> None:
        """The content is bad: neither it nor what was computed from it can be found any more. Holders keep their
        references."""
        if self._index.is_findable(block):
            for each in self._index.remove(block):
                self._blanks.put(each)

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError unless every block is accounted for exactly once."""
        blocks = range(self.num_blocks)
        held = {b for b in blocks if self._references[b] > 0}
        published = {b for b in blocks if self._index.is_findable(b)}
        blanks = list(self._blanks)
        blank = set(blanks)
        assert len(blank) == len(blanks), "a block is blank twice"
        assert not blank & held, "a blank block is held"
        assert not blank & published, "a blank block is published"
        assert blank | held | published == set(blocks), "a block is lost"
        assert self.num_held == len(held), "held blocks drifted"
        assert self.num_cached == len(published - held), "cached blocks drifted"
        self._index.validate()
