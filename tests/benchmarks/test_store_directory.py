"""The benchmark of the directory measures what it says it does."""

from __future__ import annotations

from benchmarks.store_directory import LOOKUP_LENGTHS, measure


def test_a_small_directory_is_measured_in_full() -> None:
    row = measure(num_blocks=2_000, num_nodes=4, rounds=1)
    assert 2_000 <= row["replicas"] <= 6_000
    assert row["bytes_per_block"] > 0
    assert all(row[f"match_{length}_per_s"] > 0 for length in LOOKUP_LENGTHS)
