"""Windows: what they let through, and what closing them promises."""

from __future__ import annotations

import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.errors import InvalidRequest, StaleLease
from tests.patience import NEVER_S, PATIENCE_S
from transfer import scatter
from transfer.segments import Segment, SegmentTable
from transfer.windows import WindowTable


def segment(nbytes: int = 100) -> Segment:
    return SegmentTable().register(bytearray(nbytes), readable=False)


@example(allowed={0}, start=2, length=-1)
@given(allowed=st.sets(st.integers(0, 24), min_size=1), start=st.integers(-5, 110), length=st.integers(-5, 110))
def test_a_write_is_let_through_exactly_when_all_its_bytes_are_allowed(
    allowed: set[int], start: int, length: int
) -> None:
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


def test_closing_waits_for_the_store_under_way_and_refuses_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.windows._PATIENCE_S", 0.0)  # a store has all its time
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
    monkeypatch.setattr("transfer.windows._PATIENCE_S", NEVER_S)
    table, memory = WindowTable(), segment()
    window = table.find(table.open(memory, [(0, 10)]), memory.segment_id)
    hold = window.hold(lambda: pytest.fail("revoked without need"))
    closer = threading.Thread(target=table.close, args=(window.window_id,))
    closer.start()
    hold.leave()
    hold.leave()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_closing_revokes_a_hold_that_hangs_and_grants_no_other() -> None:
    table, memory = WindowTable(), segment()
    window = table.find(table.open(memory, [(0, 10)]), memory.segment_id)
    revoked = threading.Event()
    hold = window.hold(revoked.set)

    def leave_when_revoked() -> None:
        assert revoked.wait(PATIENCE_S)
        hold.leave()

    leaver = threading.Thread(target=leave_when_revoked)
    leaver.start()
    table.close(window.window_id)
    leaver.join()
    with pytest.raises(StaleLease):
        window.hold(revoked.set)


@pytest.mark.parametrize("ranges", [[], [(0, 0)], [(-1, 2)], [(95, 6)], [(0, 10), (9, 2)]])
def test_ranges_that_make_no_sense_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidRequest):
        WindowTable().open(segment(), ranges)
