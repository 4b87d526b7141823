"""The table of admissions: what a cell says, and when the published order holds."""

from __future__ import annotations

import pytest

from benchmarks.admission import BASELINE, EARLY, PREDICTIVE, WAYS, Setting, as_table, in_order

ROW = {"rejected": 0.0, "at_handoff": 0.0, "wasted": 0.0, "effective": 1000.0}


def row(baseline: float, early: float, predictive: float) -> dict[str, dict[str, float]]:
    rejected = {BASELINE.name: baseline, EARLY.name: early, PREDICTIVE.name: predictive}
    return {way.name: {**ROW, "rejected": rejected.get(way.name, 0.0)} for way in WAYS}


@pytest.mark.parametrize(
    ("rejected", "said"),
    [
        ((161.0, 149.0, 135.0), "holds"),
        ((339.0, 347.0, 287.0), "predictive fewest"),
        ((56.0, 56.0, 63.0), "not"),
        ((60.0, 50.0, 50.0), "not"),
    ],
)
def test_the_order_is_that_of_rejections_and_equal_ones_are_none(
    rejected: tuple[float, float, float], said: str
) -> None:
    assert in_order(row(*rejected)) == said


def test_a_cell_says_rejected_at_the_handoff_wasted_and_effective() -> None:
    figures = row(161.0, 149.0, 135.0)
    figures[BASELINE.name] |= {"at_handoff": 160.0, "wasted": 0.46, "effective": 749.0}
    *_, last = as_table([(Setting(), figures)]).splitlines()
    assert "| 161 (160), 46%, **749** |" in last
    assert last.endswith("| holds |")


def test_ways_differ_in_the_simulated_spec_only_by_their_admission() -> None:
    setting = Setting(speedup=3.0, num_requests=10)
    runs = {way.name: setting.run(way, None) for way in WAYS}
    assert len({run.spec.admission for run in runs.values()}) == 4
    assert len(set(runs.values())) == len(WAYS)
    assert {(run.speedup, run.num_requests) for run in runs.values()} == {(3.0, 10)}
    assert setting.run(BASELINE, 5).num_requests == 5
