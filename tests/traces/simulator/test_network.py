"""Flows share links fairly, lose no bytes, and end when a reference that recomputes everything says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.simulator.network import Demand, Network, fair_rates

LINKS = ("a", "b", "c", "d")
CAPACITY = {"a": 10.0, "b": 4.0, "c": 7.0, "d": 1.0}


@st.composite
def paths(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3)))


@given(
    demands=st.lists(
        st.builds(Demand, paths(), st.one_of(st.just(math.inf), st.floats(0.1, 20.0))),
        min_size=1,
        max_size=12,
    )
)
def test_rates_are_max_min_fair(demands: Sequence[Demand]) -> None:
    """The certificate: each flow has what it wants, or a full link on which nobody has more."""
    capacity = dict(enumerate(CAPACITY.values()))
    rates = fair_rates(demands, capacity)
    on = {
        link: [rate for demand, rate in zip(demands, rates, strict=True) if link in demand.links] for link in capacity
    }
    for link, link_rates in on.items():
        assert sum(link_rates) <= capacity[link] * (1 + 1e-9)
    for demand, rate in zip(demands, rates, strict=True):
        bottlenecks = [
            link
            for link in demand.links
            if sum(on[link]) >= capacity[link] * (1 - 1e-9) and max(on[link]) <= rate * (1 + 1e-9)
        ]
        assert rate == demand.limit or bottlenecks


@dataclass(frozen=True, kw_only=True)
class Job:
    """A flow to start."""

    at: float
    links: tuple[int, ...]
    num_bytes: float
    earliest_s: float  # after `at`


def reference(jobs: Sequence[Job], capacity: Mapping[int, float]) -> list[float]:
    """The end of each job: at every event, all rates of all flows anew."""
    left = [job.num_bytes for job in jobs]
    ends = [math.inf] * len(jobs)
    now = 0.0
    while math.inf in ends:
        active = [i for i, job in enumerate(jobs) if job.at <= now and ends[i] == math.inf]
        limits = [jobs[i].at + jobs[i].earliest_s - now for i in active]
        demands = [
            Demand(jobs[i].links, left[i] / time_s if time_s > 1e-12 else math.inf)
            for i, time_s in zip(active, limits, strict=True)
        ]
        rates = fair_rates(demands, capacity) if active else []
        arrivals = [job.at for job in jobs if job.at > now]
        finishes = [
            max(now + left[i] / rate if left[i] > 0 else now, jobs[i].at + jobs[i].earliest_s)
            for i, rate in zip(active, rates, strict=True)
        ]
        then = min([*arrivals, *finishes])
        for i, rate, finish in zip(active, rates, finishes, strict=True):
            left[i] = max(left[i] - rate * (then - now), 0.0)
            if finish == then:
                ends[i] = then
        now = then
    return ends


JOBS = st.builds(
    Job,
    at=st.floats(0, 10),
    links=paths(),
    num_bytes=st.floats(0.01, 50),
    earliest_s=st.one_of(st.just(0.0), st.floats(0, 20)),
)


@settings(deadline=None)
@given(jobs=st.lists(JOBS, min_size=1, max_size=10))
def test_flows_end_when_the_reference_says_so(jobs: list[Job]) -> None:
    """Recomputing only what a change touches gives the same ends as recomputing everything; bytes are conserved."""
    jobs.sort(key=lambda job: job.at)
    network = Network(CAPACITY)
    ends: dict[int, float] = {}
    waiting = list(jobs)
    while waiting or len(network):
        wake_at = network.wake_at
        if waiting and (wake_at is None or waiting[0].at < wake_at):
            job = waiting.pop(0)
            names = [LINKS[link] for link in job.links]
            network.start(names, job.num_bytes, job.at, job.at + job.earliest_s)
        else:
            assert wake_at is not None
            for flow in network.advance(wake_at):
                ends[flow] = wake_at
        network.validate()
    expected = reference(jobs, dict(enumerate(CAPACITY.values())))
    assert [ends[number + 1] for number in range(len(jobs))] == pytest.approx(expected, rel=1e-6)
    assert network.bytes_carried == pytest.approx(sum(job.num_bytes for job in jobs))
    for job, end in zip(jobs, expected, strict=True):
        assert end >= job.at + job.earliest_s


def test_a_cancelled_flow_leaves_its_share_to_others() -> None:
    network = Network({"in": 10.0})
    first, second = network.start(["in"], 100, 0.0), network.start(["in"], 100, 0.0)
    network.cancel(first, 10.0)
    network.cancel(first, 10.0)
    assert network.wake_at == 15.0
    assert network.advance(15.0) == [second]
    assert (network.bytes_carried, network.bytes_given_up) == (150.0, 50.0)
    network.validate()
