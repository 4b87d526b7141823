"""Rows: merging, grouping and checking preserve the bytes they describe. Windows: which rows they admit, and what
closing them guarantees."""

import itertools
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonserve.protocol.errors import InvalidRequest, StaleLease
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.memory.scatter import LENGTH, LOCAL, REMOTE, Rows
from moonserve.transfer.memory.segments import Segment, SegmentTable
from moonserve.transfer.memory.write_windows import WindowTable
from tests.patience import NEVER_S, PATIENCE_S

Runs = list[tuple[int, int, int]]
runs = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(1, 50)), max_size=20)


def positions(rows: Rows, side: int) -> list[int]:
    return [place for row in rows.tolist() for place in range(row[side], row[side] + row[LENGTH])]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_merging_keeps_every_byte_in_order(steps: Runs) -> None:
    """The runs follow each other with small gaps, so that many are adjacent."""
    made, remote, local = [], 0, 0
    for remote_gap, local_gap, length in steps:
        remote, local = remote + remote_gap, local + local_gap
        made.append((remote, local, length))
        remote, local = remote + length, local + length
    rows = scatter.rows(*made)
    merged = data_plane().joined(rows.copy())
    for side in (REMOTE, LOCAL):
        assert positions(merged, side) == positions(rows, side)
    for first, second in itertools.pairwise(merged.tolist()):
        assert first[REMOTE] + first[LENGTH] != second[REMOTE] or (first[LOCAL] + first[LENGTH] != second[LOCAL])


@given(runs, st.integers(1, 40), st.integers(1, 7))
def test_cut_keeps_all_bytes_within_the_limits(made: Runs, limit_bytes: int, limit_rows: int) -> None:
    rows = scatter.rows(*made)
    found = list(scatter.cut(rows, limit_bytes, limit_rows))
    groups = [group for group, _ in found]
    assert all(scatter.total(group) == nbytes <= limit_bytes for group, nbytes in found)
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
def test_a_checksum_covers_the_bytes_in_order(made: Runs) -> None:
    buffer = memoryview(bytes(range(200)))
    joined = b"".join(bytes(buffer[local : local + length]) for _, local, length in made)
    whole = memoryview(joined)
    expected = scatter.checksum(whole, scatter.rows((0, 0, len(joined))), LOCAL)
    assert scatter.checksum(buffer, scatter.rows(*made), LOCAL) == expected


def segment(nbytes: int = 100) -> Segment:
    return SegmentTable().add(memoryview(bytearray(nbytes)), readable=False)


@example(allowed={0}, start=2, length=-1)
@given(allowed=st.sets(st.integers(0, 24), min_size=1), start=st.integers(-5, 110), length=st.integers(-5, 110))
def test_a_write_passes_only_if_all_its_bytes_are_inside_the_window(allowed: set[int], start: int, length: int) -> None:
    table, memory = WindowTable(), segment()
    window_id = table.open(memory, [(4 * unit, 4) for unit in allowed])
    rows = scatter.rows((start, 0, length))
    permitted = {4 * unit + i for unit in allowed for i in range(4)}
    window = table.find(window_id, memory.segment_id)
    if length > 0 and set(range(start, start + length)) <= permitted:
        window.require_inside(rows)
    elif length != 0:
        with pytest.raises(InvalidRequest):
            window.require_inside(rows)


def test_closing_waits_for_the_current_store_and_refuses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "moonserve.transfer.memory.write_windows._REVOKE_AFTER_S", 0.0
    )  # applies to holds; a store may take longer
    table, memory = WindowTable(), segment()
    window = table.find(table.open(memory, [(0, 10)]), memory.segment_id)
    closed = threading.Event()

    def close() -> None:
        table.close(window.window_id)
        closed.set()

    closer = threading.Thread(target=close)
    with window:
        closer.start()
        assert not closed.wait(0.05)
    assert closed.wait(PATIENCE_S)
    closer.join()
    with pytest.raises(StaleLease), window:
        pytest.fail("stored through a closed window")


def test_a_hold_that_ends_in_time_is_not_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonserve.transfer.memory.write_windows._REVOKE_AFTER_S", NEVER_S)
    table, memory = WindowTable(), segment()
    window = table.find(table.open(memory, [(0, 10)]), memory.segment_id)
    hold = window.hold(lambda: pytest.fail("revoked without need"))
    closer = threading.Thread(target=table.close, args=(window.window_id,))
    closer.start()
    hold.release()
    hold.release()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_closing_revokes_a_hanging_hold_and_refuses_new_ones() -> None:
    table, memory = WindowTable(), segment()
    window = table.find(table.open(memory, [(0, 10)]), memory.segment_id)
    revoked = threading.Event()
    hold = window.hold(revoked.set)

    def leave_when_revoked() -> None:
        assert revoked.wait(PATIENCE_S)
        hold.release()

    leaver = threading.Thread(target=leave_when_revoked)
    leaver.start()
    table.close(window.window_id)
    leaver.join()
    with pytest.raises(StaleLease):
        window.hold(revoked.set)


@pytest.mark.parametrize("ranges", [[], [(0, 0)], [(-1, 2)], [(95, 6)], [(0, 10), (9, 2)]])
def test_invalid_window_ranges_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest):
        WindowTable().open(segment(), ranges)
