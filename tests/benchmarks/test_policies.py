"""The table of placement policies: the best threshold is taken, ablations are real, misses are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.policies import (
    ABLATIONS,
    OURS,
    PUBLISHED,
    Ablation,
    Scenario,
    Traces,
    compared,
    figures,
)
from benchmarks.policies_page import as_page
from conductor.policies.least_added_delay import Terms
from traces.format import TraceRecord

SCENARIO = Scenario(
    trace=PUBLISHED, speedup=2.0, num_prefill=2, num_decode=1, thresholds=(1.0, 1.25)
)
FIGURES = {
    "mean_ttft_s": 10.0,
    "p50_ttft_s": 5.0,
    "p90_ttft_s": 20.0,
    "p99_ttft_s": 25.0,
    "effective_0.1": 80.0,
    "effective_0.2": 90.0,
    "requests": 100.0,
    "rejected": 0.0,
    "blocks_fetched": 7.0,
    "device_s": 50.0,
}


def records(count: int) -> list[TraceRecord]:
    """Long and short prompts in turn, faster than two machines compute them."""
    lengths = (16_000, 1_000)
    return [
        TraceRecord(
            arrived_s=number / 4,
            input_length=lengths[number % 2],
            output_length=4,
            hash_ids=tuple(range(1_000 * number, 1_000 * number + 32)),
        )
        for number in range(count)
    ]


def row(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, Any]:
    runs = SCENARIO.runs(None)
    worse = {**theirs, "mean_ttft_s": theirs["mean_ttft_s"] + 1.0}
    return compared(SCENARIO, list(zip(runs, [ours, worse, theirs], strict=True)))


def page(*rows: dict[str, Any]) -> str:
    return as_page(
        {
            "rows": rows,
            "ablations": dict.fromkeys(ABLATIONS, FIGURES),
            "ablated": {"trace": "t", "speedup": 2.0, "requests": 100},
        }
    )


def test_algorithm_1_is_taken_at_its_best_threshold() -> None:
    compared_row = row(FIGURES, FIGURES)
    assert compared_row["threshold"] == 1.25
    assert compared_row["thresholds"] == {"1.0": 11.0, "1.25": 10.0}
    assert compared_row["ratios"]["mean_ttft_s"] == 1.0


def test_the_page_says_what_misses_a_claim() -> None:
    good = {**FIGURES, "mean_ttft_s": 8.0, "effective_0.1": 95.0}
    assert "missed" not in page(row(good, FIGURES))
    slower = {**good, "p90_ttft_s": 20.5}
    assert "missed: conversation (published) 2×, 2 + 1, none: p90_ttft_s +2.5%" in page(
        row(slower, FIGURES)
    )
    assert "missed: conversation (published) 2×, 2 + 1, none." in page(
        row({**good, "mean_ttft_s": 8.6}, FIGURES)
    )


def test_leaving_terms_out_changes_the_policy_and_nothing_else() -> None:
    """All terms: the same outcomes as by the policy's name. Without an order and a price: another, slower order."""
    run, given = SCENARIO.run(OURS, 1.25, None), records(60)
    named = run.do(given)
    whole = Ablation(run=run, terms=Terms()).do(given)
    assert figures(whole) == figures(named)
    in_order = Ablation(run=run, terms=Terms(patience=0.0, steepness=None)).do(given)
    assert figures(whole)["mean_ttft_s"] < figures(in_order)["mean_ttft_s"]


def test_a_synthetic_trace_is_made_once_and_by_its_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Traces(tmp_path / "published.jsonl", tmp_path)
    first, again = found.file("synthetic seed 3"), found.file("synthetic seed 3")
    assert (first, first.digest()) == (again, again.digest())
    assert capsys.readouterr().out.count("written") == 1
    assert found.file("synthetic seed 4").digest() != first.digest()
    assert found.file(PUBLISHED).path == tmp_path / "published.jsonl"
