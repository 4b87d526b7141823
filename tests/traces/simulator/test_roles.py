"""Machines that change between prefill and decode in the simulator: nothing is lost, and it helps."""

from __future__ import annotations

from dataclasses import replace

from conductor.roles.controller import RoleTerms
from tests.traces.simulator.small import request, run_checked, spec
from traces.simulator.results import End
from traces.simulator.run import simulate

SOON = RoleTerms(hold_s=2.0, cool_down_s=10.0)


def test_decode_machines_with_nothing_to_do_help_to_prefill() -> None:
    """1.8 machines' worth of prompts for one prefill machine of four: one or two more are enough. What is under way
    when a machine gets no time to finish is placed again."""
    shape = spec(num_prefill=1, num_decode=3, ttft_slo_s=10.0, roles=SOON)
    records = [request(i / 1.8, 100, 2, base=1_000 * i) for i in range(108)]
    cluster, journeys = run_checked(replace(shape, role_drain_s=0.0), records)
    assert any(journey.attempt == 2 for journey in journeys)
    assert {journey.end for journey in journeys} == {End.COMPLETED}
    assert 1 <= cluster.counters["role_changes"] <= 2
    results = [simulate(each, records) for each in (replace(shape, roles=None), shape)]
    in_time = [sum((o.ttft_s or 99.0) <= 10.0 for o in result.outcomes) for result in results]
    assert in_time[1] > 2 * in_time[0]


def test_prefill_machines_with_nothing_to_do_help_to_decode() -> None:
    """40 answers under way hold 880 of a decode machine's 1,000 blocks, and hardly any prompts are computed."""
    records = [request(i * 0.5, 20, 400, base=1_000 * i) for i in range(240)]
    result = simulate(spec(num_prefill=3, num_decode=1, roles=SOON), records)
    assert {outcome.end for outcome in result.outcomes} == {End.COMPLETED}
    assert result.counters["role_changes"] == 1
