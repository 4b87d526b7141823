"""BlockPool: every block accounted for, shared by prefix, evicted least recently used and leaf first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from protocol.keys import NO_PARENT, BlockKey
from tests.thoroughness import examples


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


class Journal:
    """What a pool reported as findable."""

    def __init__(self) -> None:
        self.parents: dict[BlockKey, BlockKey] = {}
        self.removed: list[BlockKey] = []

    def added(self, added: BlockKey, parent: BlockKey) -> None:
        assert added not in self.parents
        self.parents[added] = parent

    def remove(self, removed: BlockKey) -> None:
        del self.parents[removed]
        self.removed.append(removed)


def make_pool(num_blocks: int, *, caching: bool = True) -> tuple[BlockPool, Journal]:
    journal = Journal()
    pool = BlockPool(
        num_blocks,
        on_added=journal.added,
        on_removed=journal.remove,
        enable_prefix_caching=caching,
    )
    return pool, journal


def publish_chain(pool: BlockPool, blocks: list[int], first: int = 1) -> list[BlockKey]:
    keys = [key(first + i) for i in range(len(blocks))]
    for block, own, parent in zip(blocks, keys, [NO_PARENT, *keys], strict=False):
        pool.publish(block, own, parent, checksum=int.from_bytes(own, "big"))
    return keys


def test_allocate_gives_distinct_blocks_until_the_pool_is_empty() -> None:
    pool, _ = make_pool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert len(set(blocks)) == 3
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 4
    pool.validate()


def test_released_blocks_stay_findable_and_are_shared_by_retain() -> None:
    pool, journal = make_pool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.release(blocks)
    assert pool.num_cached == 2
    found = pool.match_prefix([*keys, key(99)])
    assert found == blocks
    pool.retain(found)
    assert pool.num_held == 2
    assert pool.checksum_of(blocks[1]) == 2
    assert journal.parents == {keys[0]: NO_PARENT, keys[1]: keys[0]}
    pool.validate()


def test_the_leaf_of_the_least_recently_used_chain_is_evicted_first() -> None:
    pool, journal = make_pool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None
    assert new is not None
    old_keys = publish_chain(pool, old, first=1)
    new_keys = publish_chain(pool, new, first=11)
    pool.release(old)
    pool.release(new)
    pool.allocate(3)
    assert journal.removed == [old_keys[1], old_keys[0], new_keys[1]]
    assert pool.match_prefix(new_keys) == [new[0]]
    pool.validate()


def test_using_a_cached_chain_again_makes_it_young() -> None:
    pool, journal = make_pool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    publish_chain(pool, first, first=1)
    publish_chain(pool, second, first=2)
    pool.release(first)
    pool.release(second)
    pool.retain(first)
    pool.release(first)
    pool.allocate(1)
    assert journal.removed == [key(2)]
    pool.validate()


def test_a_parent_outlives_its_cached_children_even_when_it_was_released_earlier() -> None:
    pool, journal = make_pool(3)
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    pool.allocate(2)
    assert journal.removed == [keys[1]]
    pool.validate()


def test_a_beginning_that_is_needed_takes_its_held_continuation_out_of_the_cache() -> None:
    pool, journal = make_pool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.release(blocks[:1])
    assert pool.allocate(1) == blocks[:1]
    assert journal.removed == [keys[1], keys[0]]
    assert pool.key_of(blocks[1]) is None
    pool.validate()


def test_publishing_a_key_that_is_cached_already_changes_nothing() -> None:
    pool, journal = make_pool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.publish(blocks[0], key(1), NO_PARENT, checksum=5)
    pool.publish(blocks[1], key(1), NO_PARENT, checksum=6)
    assert pool.key_of(blocks[1]) is None
    assert pool.checksum_of(blocks[0]) == 5
    assert len(journal.parents) == 1
    pool.validate()


def test_forgetting_a_block_takes_what_was_computed_from_it_along() -> None:
    pool, journal = make_pool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    pool.release(blocks[2:])
    pool.forget(blocks[1])
    assert journal.removed == [keys[2], keys[1]]
    assert pool.match_prefix(keys) == blocks[:1]
    assert pool.num_held == 2
    pool.validate()


def test_without_prefix_caching_nothing_is_ever_findable() -> None:
    pool, journal = make_pool(2, caching=False)
    blocks = pool.allocate(2)
    assert blocks is not None
    keys = publish_chain(pool, blocks)
    assert pool.match_prefix(keys) == []
    assert journal.parents == {}
    pool.release(blocks)
    assert pool.num_cached == 0
    pool.validate()


def test_releasing_or_retaining_what_is_not_held_is_refused() -> None:
    pool, _ = make_pool(2)
    with pytest.raises(ValueError, match="not held"):
        pool.release([0])
    with pytest.raises(ValueError, match="blank"):
        pool.retain([1])
    pool.validate()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come with prompts from a small tree of prefixes, share what is cached, grow, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.journal = make_pool(12)
        self.sequences: list[list[int]] = []

    @staticmethod
    def chain(path: list[int]) -> list[BlockKey]:
        return [key(int("1" + "".join(map(str, path[: i + 1])))) for i in range(len(path))]

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def start(self, path: list[int]) -> None:
        keys = self.chain(path)
        cached = self.pool.match_prefix(keys)
        self.pool.retain(cached)
        fresh = self.pool.allocate(len(keys) - len(cached))
        if fresh is None:
            self.pool.release(cached)
            return
        blocks = cached + fresh
        for block, own, parent in zip(blocks, keys, [NO_PARENT, *keys], strict=False):
            self.pool.publish(block, own, parent, checksum=0)
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.pool.release(self.sequences.pop(index))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def let_the_beginning_go(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.sequences))
        if blocks:
            self.pool.release([blocks.pop(0)])

    @rule(block=st.integers(0, 11))
    def corrupt(self, block: int) -> None:
        self.pool.forget(block)

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is not None) == (count <= free)
        if blocks is not None:
            self.sequences.append(blocks)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.pool.validate()
        held = {block for blocks in self.sequences for block in blocks}
        assert self.pool.num_held == len(held)
        assert dict(self.pool.keys()) == self.journal.parents


PoolMachine.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=40, deadline=None
)
TestPoolMachine = PoolMachine.TestCase
