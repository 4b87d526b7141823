"""Tenants beside each other in virtual time: what each gets, and that one alone is served as ever."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocol.timeline import percentile
from tests.traces.simulator.small import request, run_checked, spec
from traces.format import TraceRecord
from traces.reports.saved import results_to_json
from traces.simulator.results import End
from traces.simulator.run import simulate
from traces.simulator.spec import ClusterSpec


def arrivals(tenant: str, *, seed: int, number: int, over_s: float, tokens: tuple[int, int]) -> list[TraceRecord]:
    """Prompts that share nothing, at random times."""
    random_ = random.Random(f"{tenant}{seed}")
    return [
        replace(
            request(
                random_.uniform(0.0, over_s),
                random_.randint(*tokens),
                random_.randint(1, 20),
                base=1_000_000 * (ord(tenant[0]) - 96) + 1000 * index,
            ),
            tenant=tenant,
        )
        for index in range(number)
    ]


def ttfts(spec: ClusterSpec, records: Sequence[TraceRecord], tenant: str) -> list[float]:
    """Of one tenant, of a trace in order of time."""
    ordered = sorted(records, key=lambda record: record.arrived_s)
    outcomes = simulate(spec, ordered).outcomes
    assert all(one.end is End.COMPLETED for one in outcomes)
    return [
        one.ttft_s
        for one, record in zip(outcomes, ordered, strict=True)
        if record.tenant == tenant and one.ttft_s is not None
    ]


@pytest.mark.parametrize("policy", ["global-cache-aware", "moonserve"])
def test_a_flood_leaves_another_tenants_p90_within_twice_of_what_it_is_alone(policy: str) -> None:
    """The flood is four times what two machines can compute; without tenants the quiet one waits behind all of it."""
    wish = spec(num_prefill=2, policy=policy, ttft_slo_s=30.0)
    quiet = arrivals("quiet", seed=1, number=30, over_s=100.0, tokens=(50, 400))
    flood = arrivals("flood", seed=1, number=180, over_s=45.0, tokens=(50, 400))
    same = [replace(record, tenant="quiet") for record in flood]
    alone, beside = (percentile(ttfts(wish, records, "quiet"), 90) for records in (quiet, [*quiet, *flood]))
    # A prompt of the flood that runs is not stopped: 4 s at most.
    assert beside <= 2 * alone + 4.0
    if policy != "moonserve":  # which lets short ones pass
        times = {record.arrived_s for record in quiet}
        mixed = sorted([*quiet, *same], key=lambda record: record.arrived_s)
        outcomes = simulate(wish, mixed).outcomes
        behind = [o.ttft_s or 0.0 for o in outcomes if o.arrived_s + mixed[0].arrived_s in times]
        assert percentile(behind, 90) > 3 * beside


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_who_always_wait_get_work_by_weight(weight: float) -> None:
    """Of what was computed when the first of them has nothing left, within a prompt for each machine and tenant."""
    both = [
        *arrivals("a", seed=1, number=200, over_s=1.0, tokens=(50, 400)),
        *arrivals("b", seed=2, number=200, over_s=1.0, tokens=(50, 400)),
    ]
    ordered = sorted(both, key=lambda record: record.arrived_s)
    ordered = [replace(record, output_length=1) for record in ordered]
    result = simulate(spec(num_prefill=2, tenant_weights=(("b", weight),)), ordered)
    ends = {
        tenant: [
            (record.arrived_s + (one.ttft_s or 0.0), record.input_length)
            for one, record in zip(result.outcomes, ordered, strict=True)
            if record.tenant == tenant
        ]
        for tenant in "ab"
    }
    until = min(max(at for at, _ in each) for each in ends.values())
    a, b = (sum(tokens for at, tokens in ends[t] if at <= until) for t in "ab")
    assert abs(a - b / weight) <= 3 * 2 * 400, "answers count as expected until they end"


def test_under_overload_who_asks_for_more_than_its_share_is_rejected_and_others_are_not() -> None:
    """One tenant asks for five times as much as each of three others, of which all together could be served."""
    records = [
        record
        for tenant, number in (("a", 60), ("b", 12), ("c", 12), ("d", 12))
        for record in arrivals(tenant, seed=5, number=number, over_s=10.0, tokens=(20, 400))
    ]
    ordered = sorted(records, key=lambda record: record.arrived_s)
    _, journeys = run_checked(
        spec(num_prefill=4, num_decode=2, admission="predicted", ttft_slo_s=12.0, tbt_slo_s=0.06),
        ordered,
    )
    rejected = Counter(j.record.tenant for j in journeys if j.end is End.REJECTED)
    assert rejected["a"] >= 30
    assert rejected["b"] + rejected["c"] + rejected["d"] <= 2


def test_a_tenant_alone_is_served_as_requests_without_one() -> None:
    records = arrivals("any", seed=3, number=120, over_s=60.0, tokens=(50, 400))
    ordered = sorted(records, key=lambda record: record.arrived_s)
    nameless = [replace(record, tenant="") for record in ordered]
    wish = spec(num_prefill=2, num_decode=2, admission="predicted", ttft_slo_s=8.0)
    found = [replace(simulate(wish, each), wall_s=0.0) for each in (ordered, nameless)]
    assert {one.end for one in found[0].outcomes} == {End.COMPLETED, End.REJECTED}
    assert results_to_json(found[:1]) == results_to_json(found[1:])


def test_an_urgent_prompt_runs_before_those_that_wait() -> None:
    records = [request(0.0, 200, 1, base=100 * i) for i in range(4)]
    records.append(replace(request(0.5, 200, 1, base=900), priority=-1))
    for scheduling, ttft_s in (("fcfs", 9.5), ("priority", 3.5)):
        outcomes = simulate(spec(scheduling_policy=scheduling), records).outcomes
        assert outcomes[-1].ttft_s == pytest.approx(ttft_s, abs=0.01)
        assert outcomes[-1].predicted_ttft_s == pytest.approx(ttft_s, abs=0.01)
