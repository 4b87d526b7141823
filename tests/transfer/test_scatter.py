"""Scatter lists: what merging, cutting and checking do to the bytes they describe."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from transfer import scatter

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20)


def positions(pairs: list[tuple[int, int]]) -> list[int]:
    return [place for offset, length in pairs for place in range(offset, offset + length)]


@given(ranges)
def test_merging_keeps_every_byte_in_order(pairs: list[tuple[int, int]]) -> None:
    merged = scatter.merge(pairs)
    assert positions(merged) == positions(pairs)
    assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(merged))


@given(st.lists(st.tuples(*[st.integers(0, 2**62)] * 3), max_size=20))
def test_rows_survive_the_wire(rows: list[tuple[int, int, int]]) -> None:
    assert [tuple(row) for row in scatter.unpack(scatter.pack(rows)).tolist()] == rows


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 50))))
def test_chunks_are_the_same_bytes_and_no_larger_than_allowed(
    rows: list[tuple[int, int, int]],
) -> None:
    groups = list(scatter.chunks(rows, 16))
    assert all(scatter.total(group) <= 16 for group in groups)
    flat = [row for group in groups for row in group]
    for side in (scatter.REMOTE, scatter.LOCAL):
        before = positions([(row[side], row[2]) for row in rows])
        assert positions([(row[side], row[2]) for row in flat]) == before


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=5))
def test_bounds_hold_for_any_numbers_a_peer_may_send(rows: list[tuple[int, int, int]]) -> None:
    inside = all(start >= 0 and length >= 0 and start + length <= 100 for start, _, length in rows)
    received = scatter.unpack(scatter.pack(rows))
    if inside:
        scatter.require_inside(received, scatter.REMOTE, 100)
    else:
        with pytest.raises(InvalidRequest):
            scatter.require_inside(received, scatter.REMOTE, 100)


def test_copying_small_and_large_runs() -> None:
    source = memoryview(bytes(range(256)) * 1024)
    into = memoryview(bytearray(len(source)))
    scatter.copy(into, source, [(0, 3, 10), (100, 50, 100_000), (200_000, 0, 0)])
    assert into[:10] == source[3:13]
    assert into[100:100_100] == source[50:100_050]
