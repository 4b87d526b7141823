"""Timing profile: shapes are timed within a time limit, and the coefficients are kept on disk."""

import itertools
from pathlib import Path

from moonserve.engine.speed_profile import ShapeGrid, decode_points, measure_cached, prefill_points
from tests.engine.conftest import Pair

TICKS = itertools.count(1.0).__next__
"""A clock that advances one second on each reading."""


def test_fine_grid_measures_every_shape_that_fits(llama: Pair) -> None:
    """Times chunked, partly cached prompts and batches with contexts. Shapes the model cannot hold are left out."""
    engine = llama.engine()
    grid = ShapeGrid(
        prompt_tokens=(8, 24, 10**9),
        cached_shares=(0.0, 0.95),
        batches=(1, 2),
        contexts=(4, 10**9),
        runs=1,
        chunk_tokens=7,
    )
    prefill = prefill_points(engine, grid, TICKS, 1e9)
    decode = decode_points(engine, grid, TICKS, 1e9)
    assert [(p.num_tokens, p.num_cached) for p in prefill] == [(8, 0), (8, 7), (24, 0), (24, 22)]
    assert [(p.num_seqs, p.context_tokens) for p in decode] == [(1, 4), (2, 8)]
    assert all(point.seconds > 0 for point in (*prefill, *decode))


def test_measurement_stops_at_its_time_limit_with_enough_points(llama: Pair) -> None:
    engine = llama.engine()
    grid = ShapeGrid(prompt_tokens=(8,), cached_shares=(0.0,) * 9, runs=1)
    assert len(prefill_points(engine, grid, TICKS, deadline=0.0)) == 4


def test_measurement_is_cached_per_chunk_size(llama: Pair, tmp_path: Path) -> None:
    """The chunk size is part of the key, since a prompt in larger steps takes a different time."""
    engine = llama.engine()
    first = measure_cached(engine, tmp_path, chunk_tokens=64)
    [kept] = tmp_path.iterdir()
    assert measure_cached(engine, tmp_path, chunk_tokens=64) == first
    kept.write_text("{")
    measure_cached(engine, tmp_path, chunk_tokens=64)
    assert kept.read_text() != "{"
    measure_cached(engine, tmp_path, chunk_tokens=32)
    assert len(list(tmp_path.iterdir())) == 2
