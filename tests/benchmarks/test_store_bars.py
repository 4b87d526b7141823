"""What the store benchmark claims follows from its figures, and from nothing that is missing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.store.bars import (
    disk_bars,
    hit_ratio_bars,
    metadata_bars,
    restart_bars,
    speed_bars,
)


def cell(*values_s: float, p50_us: float = 100.0) -> dict[str, Any]:
    return {
        "values_s": sorted(values_s)[len(values_s) // 2],
        "values_s_rounds": list(values_s),
        "p50_us": p50_us,
        "p50_us_rounds": [p50_us],
    }


def store(exists: dict[str, Any] | None = None, **gets: dict[str, Any]) -> dict[str, Any]:
    """Cells by size, with `_` for a space."""
    cells = {size.strip("_").replace("_", " "): {"get": cell} for size, cell in gets.items()}
    return {"cells": cells, "exists": exists}


def test_a_ratio_is_the_median_over_rounds_to_the_best_peer_of_its_size() -> None:
    results = {
        "moonserve tcp": store(_1_MiB=cell(30.0, 30.0, 90.0)),
        "redis": store(_1_MiB=cell(10.0, 10.0, 10.0)),
        "mooncake tcp": store(_1_MiB=cell(20.0, 15.0, 20.0)),
    }
    _, get = [bar for bar in speed_bars(results, ["1 MiB"]) if "/" in bar["claim"]]
    assert get["claim"] == "moonserve tcp / mooncake tcp, 1 MiB get"
    assert get["measured"] == 2.0
    assert get["met"] is True


def test_without_a_peer_nothing_is_claimed() -> None:
    results = {"moonserve tcp": store(_1_MiB=cell(30.0))}
    assert [bar["claim"] for bar in speed_bars(results, ["1 MiB"])] == [
        "moonserve tcp, exists p50, µs"
    ]


def test_a_store_that_failed_meets_no_bar() -> None:
    results = {"moonserve tcp": store(), "redis": store(_1_MiB=cell(10.0))}
    assert {bar["met"] for bar in speed_bars(results, ["1 MiB"])} == {None}


@pytest.mark.parametrize(("large_us", "met"), [(110.0, True), (200.0, False)])
def test_an_in_place_get_takes_as_long_for_large_values(large_us: float, met: bool) -> None:
    small, large = cell(1.0, p50_us=100.0), cell(1.0, p50_us=large_us)
    results = {"moonserve in place": store(_64_KiB=small, _16_MiB=large)}
    [growth] = speed_bars(results, ["64 KiB", "16 MiB"])
    assert growth["met"] is met


def test_exists_has_a_limit() -> None:
    results = {"moonserve same host": store(exists=cell(1.0, p50_us=51.0))}
    [exists] = speed_bars(results, [])
    assert (exists["measured"], exists["met"]) == (51.0, False)


def test_metadata_is_judged_at_the_largest_store_that_could_be_measured() -> None:
    points = [
        {"blocks": 10, "resident_bytes": 300.0},
        {"blocks": 100, "resident_bytes": 150.0},
        {"blocks": 1000, "failed": "killed"},
    ]
    [bar] = metadata_bars(points)
    assert (bar["measured"], bar["met"]) == (150.0, True)
    assert metadata_bars([])[0]["met"] is None


@pytest.mark.parametrize(
    ("after", "found", "wrong", "met"),
    [(0.5, 9, 0, True), (0.4, 9, 0, False), (0.5, 8, 0, False), (0.5, 9, 1, False)],
)
def test_a_restart_loses_nothing_and_alters_nothing(
    after: float, found: int, wrong: int, met: bool
) -> None:
    part = {
        "replay": {"before": 0.5, "after": after},
        "first_hit_s": 1.0,
        "full_index_s": 2.0,
        "num_before": 9,
        "num_found": found,
        "num_wrong": wrong,
    }
    assert all(bar["met"] is not False for bar in restart_bars(part)) is met


def test_each_row_of_the_disk_is_a_bar() -> None:
    rows = [
        {"operation": "read", "block_bytes": 65536, "depth": 8, "ratio": ratio}
        for ratio in (0.9, 0.7)
    ]
    assert [bar["met"] for bar in disk_bars({"bar": 0.8, "rows": rows})] == [True, False]


def test_lru_is_held_to_the_published_ratio_and_the_best_policy_to_lru() -> None:
    def point(policy: str, ratio: float) -> dict[str, Any]:
        return {"policy": policy, "capacity_tokens": 3_000_000, "token_hit_ratio": ratio}

    points = [point("lru", 0.139), point("lfu", 0.147), point("fifo", 0.1), point("belady", 0.35)]
    published, gain = hit_ratio_bars(points)
    assert published["met"] is True
    assert gain["claim"].startswith("hits of lfu / of lru")
    assert gain["measured"] == pytest.approx(0.147 / 0.139)
