"""Heat counts what was read within the window, in bounded memory."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.replication.heat import NUM_SLICES, Heat
from protocol.keys import BlockKey
from tests.thoroughness import examples


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def test_the_coldest_are_forgotten_when_too_many_are_counted() -> None:
    heat = Heat(threshold=3, max_keys=100)
    heat.record(b"".join(key(n) * 3 for n in range(10)), 0.0)
    for batch in range(20):
        heat.record(b"".join(key(1_000 + 50 * batch + n) for n in range(50)), 0.1 * batch)
        assert len(heat) <= 100
        heat.validate()
    assert sorted(heat.hot(2.0)) == sorted(key(n) for n in range(10))


def test_the_last_read_of_a_watched_block_is_remembered_beyond_the_window() -> None:
    heat = Heat()
    heat.watch(key(1), 5.0)
    assert heat.last_hit_at(key(1)) == 5.0
    heat.record(key(1) + key(2), 8.0)
    heat.record(key(2), 300.0)
    assert heat.last_hit_at(key(1)) == 8.0
    heat.unwatch(key(1))
    heat.unwatch(key(1))


def test_a_clock_that_runs_back_neither_loses_nor_invents_hits() -> None:
    heat = Heat(threshold=2, window_s=10.0)
    heat.record(key(1), 50.0)
    heat.record(key(1), 20.0)
    assert heat.hits(key(1), 50.0) == 2
    heat.validate()


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3), st.integers(1, 5)), max_size=60))
@settings(max_examples=examples(50), deadline=None)
def test_counts_equal_a_list_of_all_reads(steps: list[tuple[float, int, int]]) -> None:
    """To the length of a slice: a read counts from its slice's start. What nobody reads any more is not counted."""
    window_s = 10.0
    slice_s = window_s / NUM_SLICES
    heat = Heat(threshold=4, window_s=window_s)
    reads: deque[tuple[int, int]] = deque()
    now = 0.0
    for pause, number, count in steps:
        now += pause
        heat.record(key(number) * count, now)
        reads.extend([(int(now // slice_s), number)] * count)
        first = int(now // slice_s) - NUM_SLICES + 1
        recent = [n for at, n in reads if at >= first]
        for n in range(4):
            assert heat.hits(key(n), now) == recent.count(n)
        hot = [n for n in range(4) if recent.count(n) >= 4]
        assert heat.hot(now) == [key(n) for n in sorted(hot, key=lambda n: (-recent.count(n), n))]
        heat.validate()
    assert heat.hot(now + 2 * window_s) == []
    assert len(heat) == 0
