"""Tests of network flows: fair rates, conserved bytes, and the same ends as a reference that recomputes all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.traces.simulator.network import Demand, Network, fair_rates

LINKS = ("a", "b", "c", "d")
CAPACITY = dict(enumerate((10.0, 4.0, 7.0, 1.0)))
PATHS = st.sets(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


def network() -> Network:
    return Network(dict(zip(LINKS, CAPACITY.values(), strict=True)))


@given(st.lists(st.builds(Demand, PATHS, st.just(math.inf) | st.floats(0.1, 20.0)), min_size=1, max_size=12))
def test_rates_are_max_min_fair(demands: Sequence[Demand]) -> None:
    """Each flow has the rate that it demands, or a saturated link on which no flow has a higher rate."""
    rates = fair_rates(demands, CAPACITY)
    pairs = list(zip(demands, rates, strict=True))
    on = {link: [rate for demand, rate in pairs if link in demand.links] for link in CAPACITY}
    assert all(sum(on[link]) <= capacity * (1 + 1e-9) for link, capacity in CAPACITY.items())
    for demand, rate in pairs:
        assert rate == demand.limit or any(
            sum(on[link]) >= CAPACITY[link] * (1 - 1e-9) and max(on[link]) <= rate * (1 + 1e-9) for link in demand.links
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """A flow to start at `at`, which ends at the earliest `earliest_s` later."""

    at: float
    links: tuple[int, ...]
    num_bytes: float
    earliest_s: float  # after `at`


def reference(jobs: Sequence[Job]) -> list[float]:
    """Returns the end of each job; recomputes the rates of all flows at every event."""
    left = [job.num_bytes for job in jobs]
    ends = [math.inf] * len(jobs)
    now = 0.0
    while math.inf in ends:
        active = [i for i, job in enumerate(jobs) if job.at <= now and ends[i] == math.inf]
        demands = []
        for i in active:
            time_s = jobs[i].at + jobs[i].earliest_s - now
            demands.append(Demand(jobs[i].links, left[i] / time_s if time_s > 1e-12 else math.inf))
        rates = fair_rates(demands, CAPACITY) if active else []
        finishes = [
            max(now + left[i] / rate if left[i] > 0 else now, jobs[i].at + jobs[i].earliest_s)
            for i, rate in zip(active, rates, strict=True)
        ]
        then = min([*finishes, *(job.at for job in jobs if job.at > now)])
        for i, rate, finish in zip(active, rates, finishes, strict=True):
            left[i] = max(left[i] - rate * (then - now), 0.0)
            if finish == then:
                ends[i] = then
        now = then
    return ends


JOBS = st.builds(
    Job, at=st.floats(0, 10), links=PATHS, num_bytes=st.floats(0.01, 50), earliest_s=st.just(0.0) | st.floats(0, 20)
)


@settings(deadline=None)
@given(jobs=st.lists(JOBS, min_size=1, max_size=10))
def test_flows_end_as_in_the_reference(jobs: list[Job]) -> None:
    """Incremental recomputation gives the same ends as recomputing every rate, and bytes are conserved."""
    jobs.sort(key=lambda job: job.at)
    flows = network()
    ends: dict[int, float] = {}
    waiting = list(jobs)
    while waiting or len(flows):
        wake_at = flows.wake_at
        if waiting and (wake_at is None or waiting[0].at < wake_at):
            job = waiting.pop(0)
            flows.start([LINKS[link] for link in job.links], job.num_bytes, job.at, job.at + job.earliest_s)
        else:
            ends.update(dict.fromkeys(flows.advance(wake_at), wake_at))
        flows.validate()
    expected = reference(jobs)
    assert [ends[number + 1] for number in range(len(jobs))] == pytest.approx(expected, rel=1e-6)
    assert flows.bytes_transferred == pytest.approx(sum(job.num_bytes for job in jobs))
    assert all(end >= job.at + job.earliest_s for job, end in zip(jobs, expected, strict=True))


def test_a_cancelled_flow_leaves_its_share_to_others() -> None:
    flows = network()
    first, second = flows.start(["a"], 100, 0.0), flows.start(["a"], 100, 0.0)
    for _ in range(2):
        flows.cancel(first, 10.0)
    assert flows.wake_at == 15.0
    assert flows.advance(15.0) == [second]
    assert (flows.bytes_transferred, flows.bytes_cancelled) == (150.0, 50.0)
    flows.validate()
