"""The page of the live comparison says what was run and every row of it."""

from __future__ import annotations

from typing import Any

from benchmarks.coupled_live import SIDES, TBT_MULTIPLES, as_page


def row(side: str, goodput: float) -> dict[str, Any]:
    names = ("p50_ttft_ms", "p90_ttft_ms", "p50_itl_ms", "p99_itl_ms", "p90_tbt_ms", "hit_ratio")
    return {
        "speedup": 2.0,
        "side": side,
        "goodput_by_multiple": {f"{multiple:g}": goodput for multiple in TBT_MULTIPLES},
        "request_throughput": 3.0,
        **dict.fromkeys(names, 0.5),
    }


def test_the_page_has_a_row_per_side_and_says_of_which_load() -> None:
    page = as_page(
        {
            "load": {"trace": "t.jsonl", "requests": 200, "outputs": 0.25},
            "machine": {"cores": 2, "load": 1.5},
            "targets": {"ttft_s": 0.05, "tbt_s": 0.002},
            "rows": [row(side, goodput) for side, goodput in zip(SIDES, (1.25, 0.75), strict=True)],
        }
    )
    assert "The first 200 requests of t.jsonl, prompts at 1/16 and answers at 1/4" in page
    assert "| 2x | disaggregated | 1.25 |" in page
    assert "| 2x | coupled | 0.75 |" in page
    assert "TTFT 50.0 ms, step 2.00 ms" in page
