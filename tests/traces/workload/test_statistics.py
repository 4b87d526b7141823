"""Tests of a trace's statistics: the prefix tree, the hit curve, arrivals and sessions."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.store.hit_ratio import prompts_of, replay
from moonserve.__main__ import traces as main
from moonserve.kvstore.state import eviction
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord
from moonserve.traces.workload import statistics
from moonserve.traces.workload.analyze import format_statistics
from moonserve.traces.workload.prefix_tree import BlockRun, prefix_tree
from moonserve.traces.workload.prompts import ideal_cached_tokens
from tests.thoroughness import examples

Paths = Sequence[Sequence[int]]
# Branch numbers in a tree, so that a hash id depends on the ids before it. Paths share many prefixes.
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)


def records_of(paths: Paths, *, short: int = 0, gap_s: float = 1.0) -> list[TraceRecord]:
    """Returns one request per path, `gap_s` apart, each `short` tokens shorter than whole blocks."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        TraceRecord(
            arrived_s=index * gap_s,
            input_length=len(path) * TOKENS_PER_HASH - short,
            output_length=10,
            hash_ids=tuple(ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))),
        )
        for index, path in enumerate(paths)
    ]


def curve_of(records: list[TraceRecord]) -> statistics.HitCurve:
    total = sum(record.input_length for record in records)
    return statistics.hit_curve(prefix_tree(records), input_tokens=total, tokens_per_block=512)


@given(PATHS)
def test_the_tree_agrees_with_the_ideal_cache_and_every_request_has_one_session(paths: Paths) -> None:
    records = records_of(paths, short=3)
    tree = prefix_tree(records)
    assert int(tree.uses.sum()) == sum(len(visit.blocks) for visit in tree.visits)
    usable = [min(visit.num_seen, visit.usable) * 512 for visit in tree.visits]
    assert usable == ideal_cached_tokens(records, 512)
    assert tree.num_blocks == len({i for record in records for i in record.hash_ids})
    turns, num_sessions = statistics.turns_of(tree, records)
    assert len(turns) + num_sessions == len(records)
    assert all(turn.gap_s > 0 for turn in turns)


def test_runs_name_the_request_that_used_them_last() -> None:
    tree = prefix_tree(records_of([[0, 0, 0], [0, 1], [0, 0, 0, 0]]))
    assert [visit.runs for visit in tree.visits] == [(), (BlockRun(0, 0, 1),), (BlockRun(1, 0, 1), BlockRun(0, 1, 2))]
    assert tree.uses.tolist() == [3, 2, 2, 1, 1]


def test_an_id_behind_two_prefixes_is_two_blocks() -> None:
    records = records_of([[0, 0], [1, 0]])
    swapped = [records[0], records_of([[1]])[0]]
    assert prefix_tree(records).num_blocks == 4
    assert prefix_tree(swapped).num_blocks == 2  # the same id at the same (empty) prefix


@settings(deadline=None, max_examples=examples(30))
@given(PATHS, st.integers(6, 40))
def test_hits_at_a_capacity_are_those_of_the_stores_catalog_under_lru(paths: Paths, capacity: int) -> None:
    """Hits equal the catalog's, except for the last block of a path, and never fall with more capacity."""
    records = records_of(paths)
    caught = replay(eviction.make("lru"), prompts_of(records), room=capacity)
    usable = [min(hits, len(path) - 1) for hits, path in zip(caught, paths, strict=True)]
    hits = curve_of(records).hits.tolist()
    assert hits[min(capacity, len(hits) - 1)] == sum(usable)
    assert hits[0] == 0
    assert hits == sorted(hits)


def test_the_distance_counts_distinct_blocks_from_the_use_before() -> None:
    """Between the third block's uses lie two blocks of its own prefix and two of another chain."""
    curve = curve_of(records_of([[0, 0, 0], [1, 1], [0, 0, 0, 0]]))
    assert curve.hits.tolist() == [0, 0, 0, 1, 2, 3, 3][: len(curve.hits)]
    assert curve.ratio(None) == 3 * 512 / (9 * 512)
    assert curve.ratio(3 * 512) == pytest.approx(1 / 9)
    assert curve.distance_percentile(100) == 5 * 512


def test_steady_arrivals_have_one_rate_and_batches_are_bursty() -> None:
    steady = statistics.describe_arrivals([index * 0.5 for index in range(241)], window_s=10)
    assert steady["rates"] == [2.0] * 12
    found = (steady["mean_rate"], steady["gap_cv"], steady["dispersion"]["10s"], steady["peak_to_mean"])
    assert found == pytest.approx((2, 0, 0, 1))
    batches = statistics.describe_arrivals([index // 10 * 10.0 for index in range(1000)], window_s=60)
    assert (batches["gap_cv"], batches["dispersion"]["1s"]) == pytest.approx((3, 9), abs=0.1)


def test_turns_extend_a_prompt_and_users_of_one_system_prompt_are_strangers() -> None:
    first, second = [0, 0, 5], [0, 1, 5]
    records = records_of([first, second, [*first, 6], [0, 2], [*second, 7], [*first, 6, 8]], gap_s=2)
    tree = prefix_tree(records)
    turns, num_sessions = statistics.turns_of(tree, records)
    assert num_sessions == 3
    found = [(turn.session, turn.gap_s, turn.new_tokens) for turn in turns]
    assert found == [(0, 4, 512), (1, 6, 512), (0, 6, 512)]
    figures = statistics.describe_sessions(tree, records)
    assert (figures["extending_share"], figures["turns"]["max"]) == (0.5, 3)


def test_one_request_is_a_trace() -> None:
    found = statistics.analyze(records_of([[0, 0]]))
    assert found["arrivals"]["mean_rate"] is None
    assert found["arrivals"]["dispersion"] == {"1s": None, "10s": None, "60s": None}
    assert "requests               1" in format_statistics(found, "one.jsonl")


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = tmp_path / "t.jsonl", tmp_path / "new" / "f.json"
    record = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    trace.write_text(f"{json.dumps(record)}\n{json.dumps(record | {'timestamp': 65_005})}\n")
    assert main(["analyze", str(trace), "--capacities", "2048,512", "--json", str(figures)]) == 0
    assert "cache ratio        42.7%" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    ratio = pytest.approx(512 / 1200)
    assert (found["trace"], found["cache_ratio"]) == ("t.jsonl", ratio)
    assert [point["capacity_tokens"] for point in found["lru"]["curve"]] == [512, 2048, None]
    assert found["lru"]["curve"][-1]["hit_ratio"] == ratio
