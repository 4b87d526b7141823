"""BlockSpace: neighbours stay neighbours, and every block is free or somebody's."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.lookahead.space import BlockSpace
from tests.thoroughness import examples


def test_who_grows_gets_what_lies_behind_its_last_block() -> None:
    space = BlockSpace(10)
    assert space.take(3) == [0, 1, 2]
    assert space.take(2, after=2) == [3, 4]


def test_behind_somebody_else_one_goes_on_elsewhere() -> None:
    space = BlockSpace(10)
    first, second = space.take(3), space.take(3)
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    assert space.take(2, after=2) == [6, 7]


def test_what_lies_behind_comes_first_and_the_rest_from_another_run() -> None:
    space = BlockSpace(10)
    space.take(10)
    space.give([3, 4])
    space.give([7, 8, 9])
    assert space.take(4, after=2) == [3, 4, 7, 8]


def test_the_smallest_run_that_has_it_all_is_used() -> None:
    space = BlockSpace(20)
    space.take(20)
    space.give([0, 1, 2, 3, 4, 5])
    space.give([8, 9, 10])
    space.give([15])
    assert space.take(2) == [8, 9]
    assert space.take(1) == [10]


def test_what_fits_into_no_run_comes_from_the_largest_ones() -> None:
    space = BlockSpace(20)
    space.take(20)
    for run in ([0, 1], [5, 6, 7, 8], [12, 13, 14]):
        space.give(run)
    assert space.take(6) == [5, 6, 7, 8, 0, 1]


def test_more_than_is_free_is_refused_whole() -> None:
    space = BlockSpace(4)
    assert space.take(5) is None
    assert space.num_free == 4


def test_neighbours_that_come_back_are_one_run_again() -> None:
    space = BlockSpace(9)
    space.take(9)
    space.give([0, 1, 2])
    space.give([6, 7, 8])
    assert space.num_free_runs == 2
    space.give([3, 4, 5])
    assert (space.num_free_runs, space.largest_run) == (1, 9)


@pytest.mark.parametrize("blocks", [[3], [9], [-1], [0, 0], [0, 3]])
def test_what_nobody_has_cannot_be_given_back_and_nothing_changes(blocks: list[int]) -> None:
    space = BlockSpace(4)
    space.take(3)
    with pytest.raises(ValueError, match="given back"):
        space.give(blocks)
    assert space.num_free == 1
    space.validate()


class Takers(RuleBasedStateMachine):
    """Beside a set of free blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.space = BlockSpace(40)
        self.free = set(range(40))
        self.tables: list[list[int]] = []

    @rule(count=st.integers(1, 45))
    def take(self, count: int) -> None:
        found = self.space.take(count)
        assert (found is None) == (count > len(self.free))
        if found is not None:
            self.own(found, count)
            self.tables.append(found)

    @rule(data=st.data(), count=st.integers(1, 10))
    def grow(self, data: st.DataObject, count: int) -> None:
        if not self.tables:
            return
        table = data.draw(st.sampled_from(self.tables))
        behind = table[-1] + 1
        could = behind in self.free
        found = self.space.take(count, after=table[-1])
        if found is not None:
            assert (found[0] == behind) == could
            self.own(found, count)
            table += found

    @rule(data=st.data(), keep=st.integers(0, 40))
    def give(self, data: st.DataObject, keep: int) -> None:
        if not self.tables:
            return
        table = data.draw(st.sampled_from(self.tables))
        self.space.give(table[keep:])
        self.free.update(table[keep:])
        del table[keep:]
        if not table:
            self.tables.remove(table)

    def own(self, found: list[int], count: int) -> None:
        assert len(found) == len(set(found)) == count
        assert self.free.issuperset(found), "a block was given twice"
        self.free.difference_update(found)

    @invariant()
    def conserved(self) -> None:
        self.space.validate()
        assert self.space.num_free == len(self.free)


Takers.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestTakers = Takers.TestCase
