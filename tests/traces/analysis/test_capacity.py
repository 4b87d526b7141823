"""The hit curve, made in one pass, is that of the store's own catalog at every capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.store_hit_ratio import prompts_of, replay
from kvstore import eviction
from tests.thoroughness import examples
from tests.traces.analysis.small import records_of, trees
from traces.analysis.capacity import HitCurve, hit_curve
from traces.analysis.prefixes import prefix_tree
from traces.format import TraceRecord


def curve_of(records: list[TraceRecord]) -> HitCurve:
    total = sum(record.input_length for record in records)
    return hit_curve(prefix_tree(records), input_tokens=total, tokens_per_block=512)


@settings(deadline=None, max_examples=examples(30))
@given(trees(), st.integers(6, 40))
def test_hits_at_a_capacity_are_those_of_the_stores_catalog_under_lru(paths: list[list[int]], capacity: int) -> None:
    """Full blocks and one token more, so that each block of the path may be a hit."""
    records = records_of(paths)
    caught = replay(eviction.make("lru"), prompts_of(records), room=capacity)
    usable = [min(hits, len(path) - 1) for hits, path in zip(caught, paths, strict=True)]
    hits = curve_of(records).hits
    assert hits[min(capacity, len(hits) - 1)] == sum(usable)


@given(trees())
def test_more_room_never_costs_hits_and_no_room_has_none(paths: list[list[int]]) -> None:
    hits = curve_of(records_of(paths, short=1)).hits.tolist()
    assert hits[0] == 0
    assert hits == sorted(hits)


def test_the_distance_counts_distinct_blocks_from_the_use_before() -> None:
    """Two blocks of its own head and two of another chain lie between the third block's uses."""
    curve = curve_of(records_of([[0, 0, 0], [1, 1], [0, 0, 0, 0]]))
    assert curve.hits.tolist() == [0, 0, 0, 1, 2, 3, 3][: len(curve.hits)]
    assert curve.ratio(None) == 3 * 512 / (9 * 512)
    assert curve.ratio(3 * 512) == pytest.approx(1 / 9)
    assert curve.distance_percentile(100) == 5 * 512
