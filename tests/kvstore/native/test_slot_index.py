"""The index of rows: what was inserted is found, whatever came and went before. And who holds leading rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.native.base import NO_RECORD
from kvstore.native.slot_index import WORD_BITS, Column, HolderKernel, SlotIndex
from protocol.keys import KEY_BYTES
from tests.thoroughness import examples


def column_of(num_rows: int, seed: int = 1) -> Column:
    """Random keys."""
    keys = np.random.default_rng(seed).integers(0, 256, (num_rows, KEY_BYTES), dtype=np.uint8)
    return keys.reshape(-1).view(np.dtype((np.void, KEY_BYTES)))


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_every_key_is_found_at_its_row_while_the_index_grows_and_shrinks() -> None:
    index, column = SlotIndex(), column_of(20_000)
    order = np.random.default_rng(2).permutation(20_000)
    for part in np.array_split(order, 30):
        index.insert(column, part)
    assert np.array_equal(index.find_all(column, column.tobytes()), np.arange(20_000))
    assert index.nbytes < 9 * len(index)
    index.remove(column, order[:15_000])
    left = np.sort(order[15_000:])
    found = index.find_all(column, column.tobytes())
    assert np.array_equal(np.flatnonzero(found != NO_RECORD), left)
    assert np.array_equal(found[left], left)
    assert len(index) == 5_000


def test_leading_keys_end_at_the_first_absent_one() -> None:
    index, column = SlotIndex(), column_of(100)
    index.insert(column, rows_of(0, 1, 2, 4))
    assert index.find_leading(column, column.tobytes()).tolist() == [0, 1, 2]
    assert index.find_leading(column, column[3:].tobytes()).tolist() == []
    assert index.find_leading(column, b"").tolist() == []
    assert index.find_leading(column, column[:2].tobytes()).tolist() == [0, 1]


def test_a_column_that_moved_is_followed() -> None:
    index, column = SlotIndex(), column_of(10)
    index.insert(column, rows_of(3))
    moved = column.copy()
    column[:] = bytes(KEY_BYTES)
    assert index.find_all(moved, moved[3:4].tobytes()).tolist() == [3]


def test_rows_that_the_column_lacks_and_torn_keys_are_refused() -> None:
    index, column = SlotIndex(), column_of(10)
    for rows in (rows_of(10), rows_of(-1), rows_of(1).astype(np.int32)):
        with pytest.raises(ValueError, match="row"):
            index.insert(column, rows)
        with pytest.raises(ValueError, match="row"):
            index.remove(column, rows)
    with pytest.raises(ValueError, match="whole number"):
        index.find_all(column, bytes(KEY_BYTES + 1))
    index.remove(column, rows_of(5))  # not there
    index.insert(column, rows_of())
    assert len(index) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 199)), max_size=400))
@settings(max_examples=examples(40), deadline=None)
def test_any_order_of_changes_leaves_exactly_what_is_there(changes: list[tuple[bool, int]]) -> None:
    index, column, present = SlotIndex(), column_of(200), set()
    for adds, row in changes:
        if adds and row not in present:
            index.insert(column, rows_of(row))
            present.add(row)
        elif not adds and row in present:
            index.remove(column, rows_of(row))
            present.discard(row)
    found = index.find_all(column, column.tobytes())
    assert set(np.flatnonzero(found != NO_RECORD).tolist()) == present
    assert all(found[row] == row for row in present)
    assert len(index) == len(present)


NUM_ROWS = 8
# Mostly held by all, as prefixes are, so that runs are not all 0.
words = st.sampled_from([2**64 - 1, 2**63, 1, 0, 2**64 - 2, 0xF0F0])


@given(
    columns=st.lists(st.lists(words, min_size=NUM_ROWS, max_size=NUM_ROWS), min_size=1, max_size=3),
    rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=20),
)
def test_runs_are_those_of_a_loop_over_all_bits(columns: list[list[int]], rows: list[int]) -> None:
    table = [np.array(column, np.uint64) for column in columns]
    places = np.array(rows, np.int64)
    held, runs = HolderKernel().leading(table, places)
    assert held.tolist() == [column[places].tolist() for column in table]
    for bit in range(WORD_BITS * len(columns)):
        word, mask = divmod(bit, WORD_BITS)
        has = [bool(columns[word][row] & 1 << mask) for row in rows]
        expected = has.index(False) if False in has else len(has)
        assert runs[bit] == expected


def test_columns_that_moved_are_found_again() -> None:
    """A table that grows has other columns, and they are read from then on."""
    kernel = HolderKernel()
    rows = np.array([0], np.int64)
    for size in (1, 1000):
        column = np.full(size, size, np.uint64)
        held, _ = kernel.leading([column], rows)
        assert held.tolist() == [[size]]
