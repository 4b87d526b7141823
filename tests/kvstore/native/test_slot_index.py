"""The index of rows, compiled and in Python: what was inserted is found, whatever came and went before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.native.base import NO_RECORD
from kvstore.native.slot_index import (
    Column,
    NativeSlotIndex,
    PythonSlotIndex,
    SlotIndex,
    SlotLibrary,
)
from protocol.keys import KEY_BYTES
from tests.compilers import need_compiler
from tests.thoroughness import examples

Make = Callable[[], SlotIndex]


@pytest.fixture(params=["native", "python"], scope="module")
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    if request.param == "python":
        return PythonSlotIndex
    need_compiler()
    library = SlotLibrary(tmp_path_factory.mktemp("native"))
    return lambda: NativeSlotIndex(library)


def column_of(num_rows: int, seed: int = 1) -> Column:
    """Random keys."""
    keys = np.random.default_rng(seed).integers(0, 256, (num_rows, KEY_BYTES), dtype=np.uint8)
    return keys.reshape(-1).view(np.dtype((np.void, KEY_BYTES)))


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_every_key_is_found_at_its_row_while_the_index_grows_and_shrinks(make: Make) -> None:
    index, column = make(), column_of(20_000)
    order = np.random.default_rng(2).permutation(20_000)
    for part in np.array_split(order, 30):
        index.insert(column, part)
    assert np.array_equal(index.find_all(column, column.tobytes()), np.arange(20_000))
    index.remove(column, order[:15_000])
    left = np.sort(order[15_000:])
    found = index.find_all(column, column.tobytes())
    assert np.array_equal(np.flatnonzero(found != NO_RECORD), left)
    assert np.array_equal(found[left], left)
    assert len(index) == 5_000


def test_leading_keys_end_at_the_first_absent_one(make: Make) -> None:
    index, column = make(), column_of(100)
    index.insert(column, rows_of(0, 1, 2, 4))
    assert index.find_leading(column, column.tobytes()).tolist() == [0, 1, 2]
    assert index.find_leading(column, column[3:].tobytes()).tolist() == []
    assert index.find_leading(column, b"").tolist() == []
    assert index.find_leading(column, column[:2].tobytes()).tolist() == [0, 1]


def test_a_column_that_moved_is_followed(make: Make) -> None:
    index, column = make(), column_of(10)
    index.insert(column, rows_of(3))
    moved = column.copy()
    column[:] = bytes(KEY_BYTES)
    assert index.find_all(moved, moved[3:4].tobytes()).tolist() == [3]


def test_rows_that_the_column_lacks_and_torn_keys_are_refused(make: Make) -> None:
    index, column = make(), column_of(10)
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


def test_the_compiled_index_takes_few_bytes_per_row(make: Make) -> None:
    index, column = make(), column_of(100_000)
    for part in np.array_split(np.arange(100_000), 100):
        index.insert(column, part)
    if isinstance(index, NativeSlotIndex):
        assert index.nbytes < 9 * len(index)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 199)), max_size=400))
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_order_of_changes_leaves_exactly_what_is_there(
    make: Make, changes: list[tuple[bool, int]]
) -> None:
    index, column, present = make(), column_of(200), set()
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
