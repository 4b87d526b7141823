"""The page pool's benchmark measures what it says, at a small size. No figure of it is claimed here."""

from __future__ import annotations

import pytest

from benchmarks.engine import pages
from benchmarks.engine.pages import TABLES, Crowd, bars, measure


def test_all_columns_come_out_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pool is validated at its end, with one thread and with two."""
    monkeypatch.setattr(pages, "CALLS", 600)
    row = measure(250, rounds=2)
    for columns in TABLES.values():
        for column in columns:
            assert row[column] >= 0, column
    assert 250 <= row["blocks"] <= 500
    assert len(bars(row)) == 5


def test_bars_tell_what_was_missed() -> None:
    """By name and figure."""
    row = {"resident_mib": 3000.0, "single_blocks_per_s": 2e6, "single_p99_us": 21.0}
    row |= {"batch_blocks_per_s": 1e5, "batch_p99_us": 1.0}
    assert [verdict.split(":")[0] for verdict in bars(row)] == [
        "MISSED",
        "met",
        "MISSED",
        "MISSED",
        "met",
    ]


def test_who_goes_was_there_and_who_comes_was_not() -> None:
    """Of each part of the crowd, so that two threads never meet in one request."""
    crowd = Crowd.of(100)
    there = set(crowd.handles.tolist())
    leaving, coming, counts = crowd.replace(40)
    assert set(leaving.tolist()) <= there
    assert not set(coming.tolist()) & there
    assert len(counts) == 40
    parts = [set(crowd.handles[part::2].tolist()) for part in range(2)]
    for part in range(2):
        gone, came, _ = crowd.succession(500, part, 2)
        for old, new in zip(gone, came, strict=True):
            parts[part].remove(old)
            parts[part].add(new)
        assert parts[part] == set(crowd.handles[part::2].tolist())
