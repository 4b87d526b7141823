"""The policy `moonserve`: a block is 10 tokens, a computed token takes 10 ms, a fetched block 1 ms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.admission import Admission
from conductor.events import Phase, SwitchPolicy
from conductor.limits import Limits
from conductor.policies.base import Offers, Prompt
from conductor.policies.least_added_delay import LeastAddedDelay, Terms, yields_s
from protocol.ids import RequestId
from tests.conductor.cluster import Cluster, chain

SECONDS = st.floats(0.0, 200.0)
PREFILL_SECONDS = st.floats(1e-6, 200.0)
SLO_S = 30.0


def cluster(
    num_prefills: int = 1, *, slo_s: float = 1000.0, admission: Admission = Admission.CURRENT
) -> Cluster:
    limits = Limits(ttft_slo_s=slo_s, tbt_slo_s=1000.0, lease_s=1000.0)
    made = Cluster(policy="moonserve", limits=replace(limits, admission=admission))
    for number in range(num_prefills):
        made.store(f"s{number}", host=f"h{number}")
        made.prefill(f"p{number}", host=f"h{number}", home=f"s{number}")
    made.decode("d0", num_blocks=100_000)
    return made


def queue_s(made: Cluster, request_id: str) -> dict[str, float]:
    decision = made.state.explain(RequestId(request_id))
    assert decision is not None
    return {row.instance_id: row.queue_s for row in decision.prefill_candidates}


@given(prefill_s=PREFILL_SECONDS, waiting_s=SECONDS)
def test_a_prompt_that_is_not_late_keeps_its_objective_when_it_yields(
    prefill_s: float, waiting_s: float
) -> None:
    """The work that is there, its own, and as much again as may arrive while it yields."""
    yields = yields_s(prefill_s, waiting_s, SLO_S, Terms())
    assert yields >= 0.0
    if yields <= SLO_S:
        assert waiting_s + prefill_s + yields <= SLO_S * (1 + 1e-9)
        assert yields <= 5.0 * prefill_s


@given(prefill_s=PREFILL_SECONDS, waits=st.lists(SECONDS, min_size=2, max_size=10))
def test_the_more_waits_the_fewer_are_worth_their_seconds(
    prefill_s: float, waits: list[float]
) -> None:
    """Once a prompt is late for a queue, it is for every longer one; its yield is bounded all the same."""
    yields = [yields_s(prefill_s, waiting_s, SLO_S, Terms()) for waiting_s in sorted(waits)]
    late = [each > SLO_S for each in yields]
    assert all(then or not now for now, then in pairwise(late))
    assert max(yields) <= 30.0 * SLO_S + 10.0 * prefill_s


def test_without_an_objective_the_order_is_shortest_first() -> None:
    assert yields_s(2.0, 1e6, math.inf, Terms()) == 10.0


def test_an_objective_of_nothing_makes_everything_late_and_divides_by_nothing() -> None:
    assert yields_s(2.0, 5.0, 0.0, Terms()) == 20.0


def test_a_short_prompt_goes_before_a_long_one_that_waits_and_not_before_what_yields_less() -> None:
    made = cluster()
    made.place("running", tokens=300)  # 3 s
    assert made.place("long", tokens=1000).rank == pytest.approx(50.0)
    short = made.place("short", tokens=100)
    assert short.rank == pytest.approx(5.0)
    assert short.predicted_ttft_s == pytest.approx(3.0 + 1.0), "before the long one"
    decision = made.state.explain(RequestId("short"))
    assert decision is not None
    (candidate,) = decision.prefill_candidates
    assert (candidate.queue_s, candidate.added_s) == (pytest.approx(3.0), pytest.approx(1.0))
    made.now += 46.0
    assert made.place("later", tokens=100).predicted_ttft_s > 10.0, "the long one has waited enough"


def test_of_equal_waits_the_one_wins_where_fewer_are_delayed() -> None:
    """p0 has a prompt of 10 s running, p1 one of 2 s and behind it one of 9 s, which a prompt of 1 s would pass."""
    made = cluster(2)
    assert made.place("a", tokens=1000).prefill.instance_id == "p0"
    assert made.place("b", tokens=200).prefill.instance_id == "p1"
    assert made.place("c", tokens=900).prefill.instance_id == "p1"
    assert made.place("d", tokens=100).prefill.instance_id == "p1", "2 s and 1 s for c, not 10 s"
    made.now += 8.5  # a has 1.5 s left; p1, of which nothing is heard, has c of 9 s and d before it
    assert made.place("e", tokens=100).prefill.instance_id == "p0"


def test_a_prefix_is_fetched_where_that_is_faster_than_computing_it() -> None:
    """However little is missing: there is no threshold."""
    made, keys = cluster(2), chain("shared", 20)
    made.heartbeat("s0", holds=keys)
    made.heartbeat("s1", holds=keys[:19])
    made.place("busy", tokens=400)
    fetched = made.place("r", keys=keys, tokens=205)
    assert fetched.prefill.instance_id == "p1"
    assert [(s.store.instance_id, s.num_blocks) for s in fetched.prefix_sources] == [
        ("s1", 19),
        ("s0", 1),
    ]


@pytest.mark.parametrize(("busy_tokens", "chosen"), [(10, "p0"), (30, "p1")])
def test_of_similar_instances_the_one_wins_that_holds_the_prefix(
    busy_tokens: int, chosen: str
) -> None:
    """Fetching takes 20 ms, computing 2 s, and a copy counts a tenth of that: 0.1 s of queue are worth it, 0.3 not."""
    made, keys = cluster(2), chain("shared", 20)
    made.heartbeat("s0", holds=keys)
    made.place("busy", tokens=busy_tokens)
    assert made.place("r", keys=keys, tokens=205).prefill.instance_id == chosen


def test_a_prompt_that_costs_more_than_it_brings_waits_behind_all_others() -> None:
    """An objective of 10 s, 6 s of queue: worth it up to 10 · 0.4⁴ = 0.256 s of prefill."""
    made = cluster(slo_s=10.0, admission=Admission.NONE)
    made.place("running", tokens=600)
    late = made.place("late", tokens=100)
    assert late.rank == pytest.approx(300.0 + 10.0)
    worth_it = made.place("worth it", tokens=25)
    assert worth_it.predicted_ttft_s == pytest.approx(6.25), "before the late one"
    assert queue_s(made, "late") == {"p0": pytest.approx(10.0)}, "6 s, and what passes it"
    made.report("running", Phase.FIRST_TOKEN)
    made.report("worth it", Phase.FIRST_TOKEN)
    assert made.place("next", tokens=100).predicted_ttft_s == pytest.approx(2.0)


def test_what_is_late_is_not_counted_among_what_others_wait_for() -> None:
    """Nothing but late prompts wait behind the first, so the price of the last is that of an idle instance."""
    made = cluster(slo_s=10.0, admission=Admission.NONE)
    made.place("running", tokens=500)
    for number in range(4):
        assert made.place(f"late {number}", tokens=100).rank > 300.0
    made.report("running", Phase.FIRST_TOKEN)
    made.now += 0.9  # of the 1 s of the late one that runs now
    assert made.place("r", tokens=300).rank < 10.0


def test_admission_refuses_a_prompt_that_costs_more_than_it_brings() -> None:
    """Its 6 s of queue and 1 s of prefill were within the objective, but not what would pass it."""
    made = cluster(slo_s=10.0)
    made.place("running", tokens=600)
    rejected = made.reject("late", num_prompt_tokens=100)
    assert rejected.predicted_ttft_s == pytest.approx(11.0)
    assert rejected.reason == "ttft_slo"
    assert made.place("worth it", tokens=25).predicted_ttft_s == pytest.approx(6.25)


def test_of_many_instances_only_some_are_looked_at_exactly_and_the_best_is_among_them() -> None:
    num_rows, asked = 100, []

    def wait_s(row: int, _rank: float) -> float:
        asked.append(row)
        return float(waits[row])

    waits = np.linspace(5.0, 1.0, num_rows)
    zeros, none = np.zeros(num_rows), np.zeros(num_rows, np.int64)
    offers = Offers(
        identity=np.arange(num_rows, dtype=np.uint64),
        chosen_at=none,
        device_blocks=none,
        prefix_blocks=none,
        queue_s=waits,
        local_s_per_block=zeros + 0.0001,
        remote_s_per_block=zeros + 0.001,
        c0=zeros,
        c1=zeros + 0.01,
        c2=zeros,
        now=0.0,
        wait_s=wait_s,
        look=lambda row, rank: (wait_s(row, rank), 0),
    )
    weighed = LeastAddedDelay().weigh(Prompt(100, 10, 0, ttft_slo_s=SLO_S), offers)
    assert int(weighed.score.argmin()) == num_rows - 1
    assert len(set(asked)) == 16
    assert np.isfinite(weighed.score).sum() == 16
    assert np.isfinite(weighed.ttft_s).all(), "the record has a prediction for all"


def test_switching_back_to_algorithm_1_leaves_what_waits_in_its_order() -> None:
    made = cluster()
    made.place("running", tokens=300)
    made.place("long", tokens=1000)
    made.send(SwitchPolicy(name="global-cache-aware", balancing_threshold=1.25, seed=0))
    assert made.place("r", tokens=100).rank == 0.0
    assert made.state.explain(RequestId("long")) is not None
