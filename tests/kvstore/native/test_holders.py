"""Who holds the leading rows, and how far: compiled and in numpy the same, and both what a loop over all bits says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.native.slot_index import WORD_BITS, NativeHolders, PythonHolders
from protocol.native import shared_cache
from tests.compilers import need_compiler

NUM_ROWS = 8
# Mostly held by all, as prefixes are, so that runs are not all 0.
words = st.sampled_from([2**64 - 1, 2**63, 1, 0, 2**64 - 2, 0xF0F0])


@pytest.fixture(scope="module")
def native() -> NativeHolders:
    need_compiler()
    return NativeHolders(shared_cache())


@given(
    columns=st.lists(st.lists(words, min_size=NUM_ROWS, max_size=NUM_ROWS), min_size=1, max_size=3),
    live=st.lists(words, min_size=3, max_size=3),
    rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=20),
)
def test_runs_are_those_of_a_loop_over_all_bits(
    native: NativeHolders, columns: list[list[int]], live: list[int], rows: list[int]
) -> None:
    table = [np.array(column, np.uint64) for column in columns]
    alive = np.array(live[: len(columns)], np.uint64)
    places = np.array(rows, np.int64)
    held, runs = native.leading(table, alive, places)
    twin_held, twin_runs = PythonHolders().leading(table, alive, places)
    assert held.tolist() == twin_held.tolist()
    assert runs.tolist() == twin_runs.tolist()
    for bit in range(WORD_BITS * len(columns)):
        word, mask = divmod(bit, WORD_BITS)
        has = [bool(columns[word][row] & live[word] >> mask << mask & 1 << mask) for row in rows]
        expected = has.index(False) if False in has else len(has)
        assert runs[bit] == expected


def test_columns_that_moved_are_found_again(native: NativeHolders) -> None:
    """A table that grows has other columns, and they are read from then on."""
    alive, rows = np.array([2**64 - 1], np.uint64), np.array([0], np.int64)
    for size in (1, 1000):
        column = np.full(size, size, np.uint64)
        held, _ = native.leading([column], alive, rows)
        assert held.tolist() == [[size]]
