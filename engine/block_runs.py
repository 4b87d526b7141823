"""Runs: blocks side by side in a pool, by their numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protocol.ids import BlockId


def runs_of(blocks: Sequence[BlockId]) -> Iterator[tuple[BlockId, BlockId]]:
    """(first, last + 1) of each run of neighbours, in the order of `blocks`."""
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield blocks[begin], blocks[index - 1] + 1
            begin = index


def num_runs(blocks: Sequence[BlockId]) -> int:
    return sum(1 for _ in runs_of(blocks))
