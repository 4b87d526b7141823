"""Copying rows and describing them to the kernel, in C as in Python."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.patience import PATIENCE_S
from transfer.native import DataPlane, address_of
from transfer.scatter import LENGTH, LOCAL, REMOTE, Rows

SIZE = 4096
both_planes = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
lengths = st.lists(st.integers(0, 300), min_size=0, max_size=40)


def rows_of(*rows: tuple[int, int, int]) -> Rows:
    return np.array(rows, np.int64).reshape(-1, 3)


@st.composite
def disjoint_rows(draw: st.DrawFn) -> Rows:
    """Destinations (LOCAL) do not overlap; sources may."""
    made, place = [], 0
    for length in draw(lengths):
        place += draw(st.integers(0, 5))
        if place + length > SIZE:
            break
        made.append((draw(st.integers(0, SIZE - length)), place, length))
        place += length
    return rows_of(*made)


@both_planes
@given(rows=disjoint_rows(), flip=st.booleans())
def test_every_row_is_copied_and_nothing_else(plane: DataPlane, rows: Rows, flip: bool) -> None:
    source = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    into, expected = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    for remote, local, length in rows.tolist():
        expected[local : local + length] = source[remote : remote + length]
    column = LOCAL
    if flip:
        rows, column = np.ascontiguousarray(rows[:, [LOCAL, REMOTE, LENGTH]]), REMOTE
    plane.copy_rows(address_of(into), address_of(source), rows, to_column=column)
    assert np.array_equal(into, expected)
    into[:] = 0
    assert plane.copy_rows_verified(address_of(into), address_of(source), rows, to_column=column)
    assert np.array_equal(into, expected)


@both_planes
@given(rows=disjoint_rows(), data=st.data())
def test_one_different_byte_makes_rows_unequal(
    plane: DataPlane, rows: Rows, data: st.DataObject
) -> None:
    source = np.random.default_rng(0).integers(1, 256, SIZE, np.uint8)
    into = np.zeros(SIZE, np.uint8)
    plane.copy_rows(address_of(into), address_of(source), rows, to_column=LOCAL)
    assert plane.rows_equal(address_of(into), address_of(source), rows, column=LOCAL)
    covered = [local + i for _, local, length in rows.tolist() for i in range(length)]
    if covered:
        into[data.draw(st.sampled_from(covered))] = 0  # no byte of the source is
        assert not plane.rows_equal(address_of(into), address_of(source), rows, column=LOCAL)


def test_a_source_that_changes_meanwhile_is_noticed(plane: DataPlane) -> None:
    source, into = np.zeros(8 << 20, np.uint8), np.zeros(8 << 20, np.uint8)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            source[:] += 1

    changing = threading.Thread(target=change)
    changing.start()
    rows = rows_of((0, 0, len(source)))
    give_up_at = time.monotonic() + PATIENCE_S
    try:
        while plane.copy_rows_verified(address_of(into), address_of(source), rows, to_column=LOCAL):
            assert time.monotonic() < give_up_at
    finally:
        done.set()
        changing.join()


def test_rows_need_neither_be_contiguous_nor_aligned(plane: DataPlane) -> None:
    source, into = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    wide = np.zeros((2, 6), np.int64)
    wide[:, ::2] = rows_of((0, 10, 5), (20, 30, 7))
    plane.copy_rows(address_of(into), address_of(source), wide[:, ::2], to_column=LOCAL)
    frame = b"x" + rows_of((40, 50, 3)).tobytes()
    unaligned = np.frombuffer(frame, "<i8", offset=1).reshape(-1, 3)
    plane.copy_rows(address_of(into), address_of(source), unaligned, to_column=LOCAL)
    assert bytes(into[10:15]) == bytes(range(5))
    assert bytes(into[30:37]) == bytes(range(20, 27))
    assert bytes(into[50:53]) == bytes(range(40, 43))


@both_planes
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100), st.integers(0, 9)), max_size=30))
def test_iovecs_are_the_same_bytes_in_the_same_order(
    plane: DataPlane, triples: list[tuple[int, int, int]]
) -> None:
    rows, base = rows_of(*triples), 1 << 40
    for column in (REMOTE, LOCAL):
        made = plane.iovecs(base, rows, column=column).tolist()
        places = [base + row[column] + i for row in triples for i in range(row[LENGTH])]
        assert [start + i for start, length in made for i in range(length)] == places
        assert all(length for _, length in made)
        assert all(
            start + length != after for (start, length), (after, _) in itertools.pairwise(made)
        )


@pytest.mark.parametrize(
    "memory",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"read-only view")[5:],
        memoryview(bytearray(b"writable view"))[5:],
        np.arange(3, dtype=np.int64),
        np.frombuffer(b"read-only array", np.uint8),
        b"",
    ],
)
def test_any_contiguous_memory_has_an_address(memory: bytes | bytearray | memoryview) -> None:
    content = bytes(memory)
    assert ctypes.string_at(address_of(memory), len(content)) == content
