"""RadixTree: how it lays prompts out as runs, which no answer shows. What it answers: test_block_pool.py."""

from __future__ import annotations

import pytest

from engine.prefix import RadixTree, make_eviction
from engine.prefix.run import Run
from engine.prefix.tree import MAX_HITS, SLACK
from protocol.ids import BlockId
from protocol.keys import NO_PARENT
from tests.engine.test_block_pool import chain


def tree_of(eviction: str = "lru", *, slack: int = SLACK) -> RadixTree:
    return RadixTree(
        64, make_eviction(eviction, 64), slack=slack, on_added=lambda key, parent: None, on_removed=lambda key: None
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


def test_runs_split_where_prompts_part_and_are_joined_once_there_are_many() -> None:
    index = tree_of()
    add(index, "abcdef", 0)
    assert index._num_runs == 1
    add(index, "abcxyz", 6)
    assert index._num_runs == 3  # abc, def, xyz
    for block in (6, 7):
        index.hold(block)
    for block in (7, 6):
        index.let_go(block)
    assert index.evict(3) == [5, 4, 3]
    assert index._num_runs == 2  # abc and xyz could be one by now
    many = tree_of(slack=0)
    for number, letter in enumerate("qrstuvw"):
        add(many, f"{letter}ab", 8 * number)
        add(many, f"{letter}bc", 8 * number + 4)
    before = many._num_runs
    for number in range(7):
        many.remove(8 * number + 4)
        many.validate()
    assert many._num_runs < before - 7


def test_a_findable_block_gets_no_second_key() -> None:
    index = tree_of()
    add(index, "a", 0)
    with pytest.raises(ValueError, match="another key"):
        index.add(0, *chain("b"), NO_PARENT, 0)


@pytest.mark.parametrize(("eviction", "survives"), [("lru", 0), ("lfu", 4)])
def test_what_is_found_often_stays_longer_with_lfu_but_not_for_ever(eviction: str, survives: int) -> None:
    index = tree_of(eviction)
    [popular] = add(index, "p", 0)
    index.hit([popular] * (MAX_HITS + 10))
    assert index.hits_of(popular) == MAX_HITS
    index.hold(popular)
    index.let_go(popular)
    evicted: list[BlockId] = []
    for number, letter in enumerate("abcdefghij"):
        [new] = add(index, letter, 1 + number)
        index.hit([new] * 100)
        index.hold(new)
        index.let_go(new)
        evicted += index.evict(1) if number else []
    assert evicted.index(popular) == survives


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
