"""The table of conditional disaggregation: rows with and without it, of the same arrivals."""

from __future__ import annotations

from benchmarks.conditional import (
    POLICIES,
    as_table,
    figures,
    main_runs,
    row_of,
    run_of,
    share_runs,
)
from protocol.step_budget import CHUNK_SHARE
from traces.format import TraceRecord
from traces.simulator.many import Run


def records(count: int) -> list[TraceRecord]:
    """A long prompt, then a short one, faster than eight machines compute them."""
    return [
        TraceRecord(
            arrived_s=number / 10,
            input_length=400 if number % 2 else 60_000,
            output_length=4,
            hash_ids=tuple(range(1_000 * number, 1_000 * number + (1 if number % 2 else 118))),
        )
        for number in range(count)
    ]


def test_a_row_says_how_many_were_prefilled_where_they_are_decoded() -> None:
    rows = [row_of(run, figures(run.do(records(60)))) for run in pair()]
    without, beside = rows
    assert (without["undivided"], without["share"]) == (0.0, None)
    assert beside["undivided"] > 0.3
    assert beside["p50_ttft_s"] < without["p50_ttft_s"]
    lines = as_table(rows).splitlines()
    assert lines[2].startswith("| global-cache-aware | 1× | no |")
    assert lines[3].startswith("| global-cache-aware | 1× | up to 0.5 of TBT |")


def pair() -> list[Run]:
    return [run_of(POLICIES[0], 1.0, share) for share in (None, CHUNK_SHARE)]


def test_every_row_has_its_counterpart() -> None:
    """Of each policy and speed one without and one with it; the shares are of the first requests."""
    runs = main_runs(None)
    keys = [(run.spec.policy, run.speedup, run.spec.conditional) for run in runs]  # type: ignore[union-attr]
    assert len(set(keys)) == len(keys) == 8
    assert {run.num_requests for run in share_runs()} == {2_000}
