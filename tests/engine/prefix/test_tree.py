"""RadixTree: the same answers as an index that looks at every block, whatever is shared, forgotten and evicted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.block_pool import BlockPool
from engine.prefix import EVICTION_NAMES, PrefixIndex, RadixTree, make_eviction
from engine.prefix.base import MAX_HITS
from engine.prefix.run import Run
from engine.prefix.tree import SLACK
from protocol.errors import ConfigError
from protocol.ids import BlockId
from protocol.keys import NO_PARENT, BlockKey
from tests.engine.prefix.naive import NaiveIndex
from tests.thoroughness import examples

NUM_BLOCKS = 24


def chain(path: str) -> list[BlockKey]:
    """The keys of a prompt; one letter is a block."""
    return [BlockKey(path[:end].rjust(16, "-").encode()) for end in range(1, len(path) + 1)]


class Twin:
    """A pool over one kind of index, and what it told."""

    def __init__(self, make_index: Callable[..., PrefixIndex], eviction: str) -> None:
        self.told: list[tuple[BlockKey, BlockKey | None]] = []
        self.make_index = make_index
        self.eviction = eviction
        self.pool = self.make_pool()
        self.held: list[list[BlockId]] = []

    def make_pool(self) -> BlockPool:
        return BlockPool(
            NUM_BLOCKS,
            on_added=lambda key, parent: self.told.append((key, parent)),
            on_removed=lambda key: self.told.append((key, None)),
            eviction=self.eviction,
            make_index=self.make_index,
        )

    def come(self, path: str, order: list[int]) -> int | None:
        """How many blocks of the prompt were found; None: there is no room for it. `order`: in which the others are
        published, if they are."""
        pool, keys = self.pool, chain(path)
        found = pool.match_prefix(keys)
        pool.retain(found)
        fresh = pool.allocate(len(keys) - len(found))
        if fresh is None:
            pool.release(found)
            return None
        pool.reused(found)
        blocks = found + fresh
        for index in order:
            if index < len(keys):
                key, parent = keys[index], keys[index - 1] if index else NO_PARENT
                pool.publish(blocks[index], key, parent, int.from_bytes(key[-12:], "big"))
        self.held.append(blocks)
        return len(found)

    def findable(self) -> dict[BlockKey, tuple[BlockKey, int, int | None, int]]:
        """Parent, references, checksum and hits of every key."""
        pool, found = self.pool, {}
        listed = pool.keys()
        for key, parent in listed:
            (block,) = pool.match_prefix([key])
            assert pool.key_of(block) == key
            figures = pool.references_of(block), pool.checksum_of(block), pool.hits_of(block)
            found[key] = (parent, *figures)
        return found


class TreeMachine(RuleBasedStateMachine):
    """Prompts of which many begin alike come, publish, let go of all or of some, and are forgotten."""

    @initialize(eviction=st.sampled_from(EVICTION_NAMES))
    def begin(self, eviction: str) -> None:
        self.tree, self.naive = (
            Twin(partial(RadixTree, slack=0), eviction),
            Twin(NaiveIndex, eviction),
        )
        self.twins = self.tree, self.naive

    @rule(path=st.text("ab", min_size=1, max_size=10))
    def come(self, path: str) -> None:
        mine, others = (twin.come(path, list(range(len(path)))) for twin in self.twins)
        assert mine == others

    @rule(
        path=st.text("ab", min_size=1, max_size=6),
        order=st.permutations(range(6)),
        end=st.integers(1, 6),
    )
    def come_in_disorder(self, path: str, order: list[int], end: int) -> None:
        mine, others = (twin.come(path, order[:end]) for twin in self.twins)
        assert mine == others

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
                twin.pool.forget(block)

    @rule(count=st.integers(1, NUM_BLOCKS))
    def make_room(self, count: int) -> None:
        for twin in self.twins:
            twin.pool.release(twin.pool.allocate(count) or [])

    @rule()
    def another_takes_over(self) -> None:
        for twin in self.twins:
            for blocks in twin.held:
                twin.pool.release(blocks)
            twin.held.clear()
            earlier, twin.pool = twin.pool, twin.make_pool()
            twin.told.clear()
            twin.pool.take_over(earlier)

    @rule(path=st.text("abc", max_size=12))
    def look(self, path: str) -> None:
        mine, others = (len(twin.pool.match_prefix(chain(path))) for twin in self.twins)
        assert mine == others

    @invariant()
    def both_say_the_same(self) -> None:
        mine, others = (twin.findable() for twin in self.twins)
        assert mine == others
        mine_told, others_told = (sorted(twin.told, key=repr) for twin in self.twins)
        assert mine_told == others_told
        pool, naive = self.tree.pool, self.naive.pool
        assert (pool.num_held, pool.num_cached) == (naive.num_held, naive.num_cached)
        for twin in self.twins:
            twin.told.clear()
            twin.pool.validate()


TreeMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestTreeMachine = TreeMachine.TestCase


def tree_of(eviction: str = "lru", *, slack: int = SLACK) -> RadixTree:
    return RadixTree(
        64,
        make_eviction(eviction, 64),
        slack=slack,
        on_added=lambda key, parent: None,
        on_removed=lambda key: None,
    )


def add(index: RadixTree, path: str, first: BlockId) -> list[BlockId]:
    """The blocks of a prompt that are new, which get numbers from `first` on, and are idle."""
    added: list[BlockId] = []
    for key, parent in zip(chain(path), [NO_PARENT, *chain(path)], strict=False):
        if index.add(first + len(added), key, parent, 0):
            added.append(first + len(added))
    for block in reversed(added):
        index.let_go(block)
    index.validate()
    return added


def test_a_prompt_is_one_run_until_another_leaves_it_in_the_middle() -> None:
    index = tree_of()
    add(index, "abcdef", 0)
    assert index.num_runs == 1
    add(index, "abcxyz", 6)
    assert index.num_runs == 3  # abc, def, xyz
    assert index.match(chain("abcdeq")) == [0, 1, 2, 3, 4]
    assert index.match(chain("abcxyzzz")) == [0, 1, 2, 6, 7, 8]
    assert index.match(chain("qabc")) == []
    assert index.match([]) == []


def test_eviction_shortens_runs_and_leaves_it_for_later_to_join_them() -> None:
    index = tree_of()
    add(index, "abcdef", 0)
    add(index, "abcxyz", 6)
    index.hold(6)
    index.hold(7)
    index.let_go(7)
    index.let_go(6)
    assert index.evict(2) == [5, 4]
    assert index.num_runs == 3
    assert index.evict(1) == [3]
    assert index.num_runs == 2  # abc and xyz could be one by now
    index.validate()
    assert index.match(chain("abcxyz")) == [0, 1, 2, 6, 7, 8]


def test_many_runs_with_one_child_are_joined() -> None:
    index = tree_of(slack=0)
    for number, letter in enumerate("qrstuvw"):
        add(index, f"{letter}ab", 8 * number)
        add(index, f"{letter}bc", 8 * number + 4)
    before = index.num_runs
    for number in range(7):
        index.remove(8 * number + 4)
        index.validate()
    assert index.num_runs < before - 7
    for number, letter in enumerate("qrstuvw"):
        assert index.match(chain(f"{letter}ab")) == [8 * number + i for i in range(3)]


def test_a_block_that_is_published_before_its_parent_waits_for_it() -> None:
    index = tree_of(slack=0)
    keys = chain("abcd")
    for number, position in enumerate([3, 1, 2]):
        assert index.add(number, keys[position], keys[position - 1], 0)
        index.validate()
    assert index.match(keys) == []
    assert index.match(keys[1:]) == [1, 2, 0]
    index.add(3, keys[0], NO_PARENT, 0)
    index.validate()
    assert index.match(keys) == [3, 1, 2, 0]
    assert [(key, parent) for key, parent, _ in index.items()] == list(
        zip(keys, [NO_PARENT, *keys], strict=False)
    )


def test_a_findable_block_gets_no_second_key() -> None:
    index = tree_of()
    add(index, "a", 0)
    with pytest.raises(ValueError, match="another key"):
        index.add(0, *chain("b"), NO_PARENT, 0)
    assert not index.add(0, *chain("a"), NO_PARENT, 0)
    index.validate()


def test_least_frequently_used_keeps_what_is_found_often_but_not_for_ever() -> None:
    index = tree_of("lfu")
    [popular] = add(index, "p", 0)
    for _ in range(3):
        index.hit([popular])
        index.hold(popular)
        index.let_go(popular)
    evicted: list[BlockId] = []
    for number, letter in enumerate("abcdefghij"):
        [new] = add(index, letter, 1 + number)
        index.hit([new])
        index.hold(new)
        index.let_go(new)
        if number:
            evicted += index.evict(1)
        index.validate()
    assert evicted[0] == 1
    assert popular in evicted


def test_least_recently_used_lets_the_popular_go_when_its_turn_comes() -> None:
    index = tree_of()
    [popular] = add(index, "p", 0)
    index.hit([popular, popular])
    add(index, "a", 1)
    assert index.evict(1) == [popular]
    assert index.hits_of(popular) == 0


def test_hits_are_counted_as_far_as_a_byte_goes() -> None:
    index = tree_of()
    [block] = add(index, "a", 0)
    index.hit([block] * (MAX_HITS + 10))
    assert index.hits_of(block) == MAX_HITS


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lru, lfu"):
        make_eviction("fifo", 1)


@pytest.mark.parametrize("length", [1, 2, 7, 12])
def test_what_two_runs_have_in_common_is_found_to_the_block(length: int) -> None:
    run = Run(None, 0)
    for number, key in enumerate(chain("a" * length)):
        run.append(key, number)
    for differs_at in range(length):
        keys = chain("a" * differs_at + "b" * (length - differs_at))
        assert run.common(0, b"".join(keys), 0) == differs_at
    packed = b"".join(chain("a" * (length + 3)))
    assert run.common(0, packed, 0) == length
    assert run.common(length - 1, packed, length - 1) == 1
