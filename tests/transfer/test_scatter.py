"""Scatter lists: what merging, cutting and checking do to the bytes they describe."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest
from transfer import scatter
from transfer.scatter import LENGTH, LOCAL, REMOTE, Rows

Runs = list[tuple[int, int, int]]
runs = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 50)), max_size=20)


def positions(rows: Rows, side: int) -> list[int]:
    return [place for row in rows.tolist() for place in range(row[side], row[side] + row[LENGTH])]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_merging_keeps_every_byte_in_order(steps: Runs) -> None:
    """Runs that follow each other with small gaps, so that many touch."""
    made, remote, local = [], 0, 0
    for remote_gap, local_gap, length in steps:
        remote, local = remote + remote_gap, local + local_gap
        made.append((remote, local, length))
        remote, local = remote + length, local + length
    rows = scatter.rows(*made)
    merged = scatter.merge(rows)
    for side in (REMOTE, LOCAL):
        assert positions(merged, side) == positions(rows, side)
    for first, second in itertools.pairwise(merged.tolist()):
        assert first[REMOTE] + first[LENGTH] != second[REMOTE] or (first[LOCAL] + first[LENGTH] != second[LOCAL])


@given(runs, st.integers(1, 40), st.integers(1, 7))
def test_groups_are_the_same_bytes_and_no_larger_than_allowed(made: Runs, limit_bytes: int, limit_rows: int) -> None:
    rows = scatter.rows(*made)
    groups = list(scatter.cut(rows, limit_bytes, limit_rows))
    assert all(scatter.total(group) <= limit_bytes for group in groups)
    assert all(1 <= len(group) <= limit_rows for group in groups)
    for side in (REMOTE, LOCAL):
        flat = [place for group in groups for place in positions(group, side)]
        assert flat == positions(rows, side)


int64 = st.integers(-(2**63), 2**63 - 1)
near_an_edge = st.sampled_from([-1, 0, 1, 50, 99, 100, 101, 2**62, 2**63 - 1, -(2**63)]) | int64
fitting = st.integers(0, 100).flatmap(lambda start: st.tuples(st.just(start), int64, st.integers(0, 100 - start)))


@given(st.lists(st.tuples(near_an_edge, int64, near_an_edge) | fitting, max_size=3))
@example([(-1, 0, 1)])
@example([(-1, 0, 1), (0, 0, 1)])
@example([(0, 0, -1)])
@example([(0, 0, -1), (0, 0, 1)])
@example([(99, 0, 2)])
@example([(99, 0, 2), (0, 0, 1)])
@example([(0, 0, 100)])
@example([(100, 0, 0), (99, 0, 1)])
@example([(2**63 - 1, 0, 2**63 - 1), (0, 0, 1)])
def test_bounds_hold_for_any_numbers_a_peer_may_send(made: Runs) -> None:
    inside = all(start >= 0 and length >= 0 and start + length <= 100 for start, _, length in made)
    received = scatter.unpack(scatter.pack(scatter.rows(*made)))
    if inside:
        scatter.require_inside(received, REMOTE, 100)
    else:
        with pytest.raises(InvalidRequest):
            scatter.require_inside(received, REMOTE, 100)


@given(runs)
def test_a_checksum_is_that_of_the_bytes_in_order(made: Runs) -> None:
    buffer = memoryview(bytes(range(200)))
    joined = b"".join(bytes(buffer[local : local + length]) for _, local, length in made)
    whole = memoryview(joined)
    expected = scatter.checksum(whole, scatter.rows((0, 0, len(joined))), LOCAL)
    assert scatter.checksum(buffer, scatter.rows(*made), LOCAL) == expected
