"""Neighbours are found in the order in which blocks are given."""

from __future__ import annotations

import pytest

from engine.block_runs import num_runs, runs_of


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([7], [(7, 8)]),
        ([3, 4, 5, 1, 2, 9], [(3, 6), (1, 3), (9, 10)]),
        ([5, 4], [(5, 6), (4, 5)]),
    ],
)
def test_runs_are_neighbours_in_order(blocks: list[int], runs: list[tuple[int, int]]) -> None:
    assert list(runs_of(blocks)) == runs
    assert num_runs(blocks) == len(runs)
