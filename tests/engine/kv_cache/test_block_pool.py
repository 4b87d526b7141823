"""BlockPool counts every block, shares prefixes, evicts in order, keeps a reserve for urgent requests and clears
blocks. The radix tree gives the same answers as a dict of keys (benchmarks.engine.prefix)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.engine.prefix import DictIndex
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.eviction import EVICTION_NAMES, make_eviction
from moonserve.engine.kv_cache.radix_tree import MAX_HITS, SLACK, RadixTree
from moonserve.engine.kv_cache.tensors import BlockZeroer, consecutive_runs
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, KvLayout
from moonserve.protocol.request import BlockId
from tests.thoroughness import any_order

NUM_BLOCKS = 24
LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")


def chain(path: str) -> list[BlockKey]:
    """Returns the keys of a prompt, in which each letter is one block."""
    return [BlockKey(path[:end].rjust(16, "-").encode()) for end in range(1, len(path) + 1)]


class Told:
    """Pool with a record of the events it reported."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, **options: Any) -> None:
        self.said: list[tuple[BlockKey, BlockKey | None]] = []
        self.zeroed: list[BlockId] = []
        options.setdefault("zero", self.zeroed.extend)
        self.options = options
        self.num_blocks = num_blocks
        self.held: list[list[BlockId]] = []
        self.pool = self.make_pool()

    def make_pool(self) -> BlockPool:
        return BlockPool(
            self.num_blocks,
            on_added=lambda key, parent: self.said.append((key, parent)),
            on_removed=lambda key: self.said.append((key, None)),
            **self.options,
        )

    def allocate(self, count: int, *, leave_reserve: bool = False) -> list[BlockId] | None:
        """Allocates, and checks the result against the free, reserved and cached counts that the pool reported."""
        pool = self.pool
        free, cached, refused, evicted = (pool.num_free, pool.num_cached, pool.num_refused, pool.num_evicted)
        share = self.options.get("reserved_share", 0.0)
        kept = math.ceil(share * self.num_blocks) if leave_reserve else 0
        self.zeroed.clear()
        blocks = pool.allocate(count, leave_reserve=leave_reserve)
        assert (blocks is None) == (count + kept > free)
        assert pool.num_refused - refused == (blocks is None)
        if blocks is None:
            assert (pool.num_cached, self.zeroed) == (cached, []), "a refusal changes nothing"
            return None
        assert pool.num_evicted - evicted == max(0, count - (free - cached))
        assert len(set(blocks)) == count
        assert self.zeroed == blocks, "each is cleared before it is handed out"
        assert all(pool.key_of(b) is None and pool.references_of(b) == 1 for b in blocks)
        return blocks

    def publish(self, blocks: list[BlockId], path: str, order: list[int] | None = None) -> list[BlockKey]:
        """Publishes all blocks of a prompt, or those at the indices in `order`, in this order."""
        keys = chain(path)
        for index in range(len(keys)) if order is None else order:
            if index < len(keys):
                key, parent = keys[index], keys[index - 1] if index else NO_PARENT
                self.pool.publish(blocks[index], key, parent, int.from_bytes(key[-12:], "big"))
        return keys

    def come(self, path: str, order: list[int]) -> int | None:
        """Lets a prompt use the pool. Returns how many of its blocks were found, or None if it does not fit."""
        pool, keys = self.pool, chain(path)
        found = pool.match_prefix(keys)
        pool.retain(found)
        fresh = self.allocate(len(keys) - len(found))
        if fresh is None:
            pool.release(found)
            return None
        pool.count_hits(found)
        blocks = found + fresh
        self.publish(blocks, path, order)
        self.held.append(blocks)
        return len(found)

    def findable(self) -> dict[BlockKey, tuple[BlockKey, int, int | None, int]]:
        """Returns parent, references, checksum and hits of every key."""
        pool, found = self.pool, {}
        listed = pool.keys()
        for key, parent in listed:
            (block,) = pool.match_prefix([key])
            assert pool.key_of(block) == key
            found[key] = (parent, pool.references_of(block), pool.checksum_of(block), pool.hits_of(block))
        return found


class Twins(RuleBasedStateMachine):
    """Prompts with common prefixes allocate, publish, release some or all blocks, and are forgotten."""

    @initialize(eviction=st.sampled_from(EVICTION_NAMES), share=st.sampled_from([0.0, 0.2, 0.9]))
    def begin(self, eviction: str, share: float) -> None:
        self.tree, self.plain = (
            Told(make_index=make_index, eviction=eviction, reserved_share=share)
            for make_index in (partial(RadixTree, slack=0), DictIndex)
        )
        self.twins = self.tree, self.plain

    def same(self, ask: Callable[[Told], object]) -> None:
        mine, others = map(ask, self.twins)
        assert mine == others

    @rule(path=st.text("ab", min_size=1, max_size=10))
    def come(self, path: str) -> None:
        self.same(lambda twin: twin.come(path, list(range(len(path)))))

    @rule(path=st.text("ab", min_size=1, max_size=6), order=st.permutations(range(6)), end=st.integers(1, 6))
    def come_in_disorder(self, path: str, order: list[int], end: int) -> None:
        self.same(lambda twin: twin.come(path, order[:end]))

    @precondition(lambda self: self.tree.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tree.held) - 1))
        for twin in self.twins:
            twin.pool.release(twin.held.pop(index))

    @precondition(lambda self: self.tree.held)
    @rule(data=st.data())
    def let_the_beginning_go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tree.held) - 1))
        count = data.draw(st.integers(0, len(self.tree.held[index])))
        for twin in self.twins:
            blocks = twin.held[index]
            twin.pool.release(blocks[:count])
            del blocks[:count]

    @rule(path=st.text("ab", min_size=1, max_size=10))
    def forget(self, path: str) -> None:
        for twin in self.twins:
            for block in twin.pool.match_prefix(chain(path)[-1:]):
                twin.pool.uncache(block)

    @rule(count=st.integers(0, NUM_BLOCKS), leave_reserve=st.booleans())
    def make_room(self, count: int, leave_reserve: bool) -> None:
        for twin in self.twins:
            twin.pool.release(twin.allocate(count, leave_reserve=leave_reserve) or [])

    @rule()
    def another_takes_over(self) -> None:
        for twin in self.twins:
            for blocks in twin.held:
                twin.pool.release(blocks)
            twin.held.clear()
            earlier, twin.pool = twin.pool, twin.make_pool()
            findable = set(earlier.keys())
            twin.said.clear()
            twin.pool.adopt_cache(earlier)
            assert set(twin.said) == findable, "every block is announced"
            assert twin.pool.num_free == NUM_BLOCKS

    @rule(path=st.text("abc", max_size=12))
    def look(self, path: str) -> None:
        self.same(lambda twin: len(twin.pool.match_prefix(chain(path))))

    @invariant()
    def parents_are_listed_first(self) -> None:
        listed = self.tree.pool.keys()
        keys = [key for key, _ in listed]
        assert not any(parent in keys[at:] for at, (_, parent) in enumerate(listed))

    @invariant()
    def both_say_the_same(self) -> None:
        self.same(Told.findable)
        self.same(lambda twin: sorted(twin.said, key=repr))
        self.same(lambda twin: twin.pool.num_cached)
        for twin in self.twins:
            twin.said.clear()
            twin.pool.validate()
            assert twin.pool.num_held == len({b for blocks in twin.held for b in blocks})


TestTwins = any_order(Twins, 60)


def test_evicting_a_block_uncaches_its_held_continuation() -> None:
    one = Told(2)
    blocks = one.allocate(2) or []
    keys = one.publish(blocks, "ab")
    one.said.clear()
    one.pool.release(blocks[:1])
    assert one.allocate(1) == blocks[:1]
    assert [key for key, _ in one.said] == [keys[1], keys[0]]
    assert one.pool.key_of(blocks[1]) is None
    one.pool.validate()


def test_no_block_is_findable_without_prefix_caching() -> None:
    one = Told(2, enable_prefix_caching=False)
    blocks = one.allocate(2) or []
    keys = one.publish(blocks, "ab")
    assert (one.pool.match_prefix(keys), one.said) == ([], [])
    one.pool.release(blocks)
    assert one.pool.num_cached == 0
    later = Told(2, enable_prefix_caching=False)
    later.pool.adopt_cache(one.pool)
    later.pool.validate()


def test_invalid_call_is_refused_and_changes_nothing() -> None:
    one = Told(2)
    held = one.allocate(1) or []
    for wrong in (one.pool.release, one.pool.retain):
        with pytest.raises(ValueError, match=r"not held|blank"):
            wrong([1 - held[0]])
    with pytest.raises(ValueError, match="not held"):
        one.publish([1 - held[0]], "a")
    with pytest.raises(ValueError, match="only an empty pool"):
        one.pool.adopt_cache(Told(2).pool)
    with pytest.raises(ValueError, match="of the same size"):
        Told(3).pool.adopt_cache(one.pool)
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="reserved share"):
            Told(2, reserved_share=share)
    with pytest.raises(ConfigError, match="lru, lfu"):
        Told(2, eviction="fifo")
    one.pool.validate()


def test_zeroing_clears_all_pieces_of_its_blocks_and_no_others() -> None:
    memory = memoryview(bytearray(b"\xff" * LAYOUT.pool_bytes(6)))
    one = Told(6, zero=BlockZeroer(memory, LAYOUT, 6))
    blocks = one.pool.allocate(3) or []
    for piece in range(LAYOUT.pieces_per_block):
        for block in range(6):
            first = LAYOUT.pool_offset(6, piece, block)
            own = bytes(memory[first : first + LAYOUT.piece_bytes])
            assert own == (b"\0" if block in blocks else b"\xff") * LAYOUT.piece_bytes
    assert list(consecutive_runs([3, 4, 5, 7, 1, 2])) == [(3, 6), (7, 8), (1, 3)]
    needed = LAYOUT.pool_bytes(6)
    for wrong in (memoryview(bytearray(needed - 1)), memoryview(bytes(needed))):
        with pytest.raises(ValueError, match=f"need {needed} writable bytes"):
            BlockZeroer(wrong, LAYOUT, 6)


def tree_of(eviction: str = "lru", *, slack: int = SLACK) -> RadixTree:
    return RadixTree(
        64, make_eviction(eviction, 64), slack=slack, on_added=lambda key, parent: None, on_removed=lambda key: None
    )


def add(index: RadixTree, path: str, first: BlockId) -> list[BlockId]:
    """Adds a prompt. Returns its new blocks, numbered from `first` on, which are idle."""
    added: list[BlockId] = []
    for key, parent in zip(chain(path), [NO_PARENT, *chain(path)], strict=False):
        if index.add(first + len(added), key, parent, 0):
            added.append(first + len(added))
    for block in reversed(added):
        index.mark_idle(block)
    index.validate()
    return added


def test_runs_split_where_prompts_diverge_and_are_joined_when_there_are_many() -> None:
    index = tree_of()
    add(index, "abcdef", 0)
    assert index._num_runs == 1
    add(index, "abcxyz", 6)
    assert index._num_runs == 3  # abc, def, xyz
    for block in (6, 7):
        index.mark_held(block)
    for block in (7, 6):
        index.mark_idle(block)
    assert index.evict(3) == [5, 4, 3]
    assert index._num_runs == 2  # abc and xyz, which could now be joined
    many = tree_of(slack=0)
    for number, letter in enumerate("qrstuvw"):
        add(many, f"{letter}ab", 8 * number)
        add(many, f"{letter}bc", 8 * number + 4)
    before = many._num_runs
    for number in range(7):
        many.remove(8 * number + 4)
        many.validate()
    assert many._num_runs < before - 7


def test_findable_block_gets_no_second_key() -> None:
    index = tree_of()
    add(index, "a", 0)
    with pytest.raises(ValueError, match="another key"):
        index.add(0, *chain("b"), NO_PARENT, 0)


@pytest.mark.parametrize(("eviction", "survives"), [("lru", 0), ("lfu", 4)])
def test_lfu_keeps_frequently_used_blocks_longer_but_not_for_ever(eviction: str, survives: int) -> None:
    index = tree_of(eviction)
    [popular] = add(index, "p", 0)
    index.hit([popular] * (MAX_HITS + 10))
    assert index.hits_of(popular) == MAX_HITS
    index.mark_held(popular)
    index.mark_idle(popular)
    evicted: list[BlockId] = []
    for number, letter in enumerate("abcdefghij"):
        [new] = add(index, letter, 1 + number)
        index.hit([new] * 100)
        index.mark_held(new)
        index.mark_idle(new)
        evicted += index.evict(1) if number else []
    assert evicted.index(popular) == survives
