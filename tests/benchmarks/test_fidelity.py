"""Fidelity's own arithmetic: figures of a simulation as a replay's report has them, errors, the page."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.fidelity import figures_of, journeys_after, relative, spec_of
from benchmarks.fidelity_page import FIGURES, MORE_FIGURES, as_page
from benchmarks.fidelity_rounds import combined
from tests.traces.simulator.small import MODEL, request
from traces.simulator.spec import ClusterSpec, Overheads

NEAR = pytest.approx


SIDES = ("live", "simulated", "predicted")


def a_spec(**changes: object) -> ClusterSpec:
    spec = spec_of(replace(MODEL, **changes), 1, 1)  # type: ignore[arg-type]
    return replace(spec, block_size=10, chunk_tokens=1000, admission="none")


def test_figures_of_a_simulation_are_those_of_a_report() -> None:
    """Prompts of 2 and 1 s at 100 tokens per second, the second one with half of it cached; 50 ms per step."""
    shared = list(range(5))
    records = [
        request(1.0, 200, 11, shared, base=20),
        request(10.0, 100, 11, shared, base=70),
    ]
    spec = a_spec(overheads=Overheads(request_s=0.5))
    figures = figures_of(spec, journeys_after(spec, records))
    assert figures["completed"] == 2
    assert figures["p50_ttft_ms"] == NEAR((2500 + 1000) / 2, rel=1e-3)
    assert figures["p50_itl_ms"] == NEAR(50, rel=1e-3)
    assert figures["hit_ratio"] == NEAR(50 / 300)
    # From the begin of the trace, not of its first request.
    assert figures["duration"] == NEAR(10 + 0.5 + 0.5 + 10 * 0.05, rel=1e-3)
    assert figures["request_throughput"] == NEAR(2 / 11.5, rel=1e-3)
    assert figures["prediction_error"] < 0.05
    assert not any(math.isnan(figures[name]) for name in FIGURES | MORE_FIGURES)


def test_an_error_is_relative_to_what_happened() -> None:
    assert relative(110.0, 100.0) == NEAR(0.1)
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) == math.inf


def test_rounds_become_their_medians_and_errors_keep_their_range() -> None:
    """The middle of each error, whatever the medians of both sides would say; lists as far as all of them go."""
    rounds = [
        {"errors": {"ttft": off}, "live": {"ttft": live}, "factors": factors, "lost_hits": []}
        for off, live, factors in (
            (0.3, 10, [1.0, 1.5]),
            (-0.1, 12, [1.0, 1.7, 2.0]),
            (0.05, 50, [1.0, 1.6]),
        )
    ]
    found = combined(rounds)
    assert found["errors"] == {"ttft": 0.05}
    assert found["error_ranges"] == {"ttft": [-0.1, 0.3]}
    assert (found["live"], found["factors"]) == ({"ttft": 12}, [1.0, 1.6])
    assert (found["lost_hits"], found["rounds"]) == ([], 3)


def test_the_page_says_what_is_within_and_what_is_not() -> None:
    """One figure off: its row says so, and so does the claim."""
    live = dict.fromkeys(FIGURES | MORE_FIGURES, 100.0)
    simulated = live | {"p90_ttft_ms": 120.0}
    shape = {
        "prefill": 2,
        "decode": 1,
        "kernels": "native",
        "profile": {
            "prefill": [1e-3, 1e-5, 1e-8],
            "decode": [1e-3, 1e-5, 1e-8],
            "request_ms": 5.0,
            "gateway_ms": 0.5,
            "back_ms": 2.0,
            "late_back_ms": 1.0,
            "turnover_ms": 9.0,
            "landing_ms": 1.0,
            "handoff_ms": 2.0,
            "crowding_prefill": [1.0, 1.2],
            "crowding_decode": [1.0],
            "crowding_batch": [],
            "crowding_request": [],
            "crowding_landing": [1.0, 4.0],
            "crowding_handoff": [],
            "prefills_prefill": [1.0, 1.1],
            "prefills_request": [],
            "prefills_landing": [],
        },
        "live": live,
        "simulated": simulated,
        "means": dict.fromkeys(
            (f"{s}_{t}_ms" for s in SIDES for t in ("before", "queue", "load", "prefill", "rest")),
            7.0,
        ),
        "prediction_errors": {"ttft": 0.125},
        "errors": {name: relative(simulated[name], live[name]) for name in live},
        "met": False,
        "predictions_met": True,
    }
    shape = {**combined([shape]), "met": False}
    load = {"trace": "t.jsonl", "requests": 10, "speedup": 2.0, "policy": "random"}
    machine = {"processor": "p", "cores": 2, "load": 0.5}
    page = as_page({"machine": machine, "load": load, "shapes": [shape]})
    assert "| TTFT p90, ms | 100 | 120 | +20.0% | +20% … +20% | NO |" in page
    assert "| TTFT p50, ms | 100 | 100 | +0.0% | +0% … +0% | yes |" in page
    assert "landing 1.00, 4.00" in page
    assert "request 5.0 (the gateway's part 0.5, the way back 2.0, " in page
    assert "none of which decodes: prefill 1.00, 1.10" in page
    assert "ttft 12.5%" in page
    assert "is NOT met" in page
    assert "## 2 prefill, 1 decode" in page
