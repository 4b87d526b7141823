"""Prompts wait by arrival + rank: a policy gives it, the books predict by it, and it travels with the placement."""

from __future__ import annotations

import numpy as np
import pytest

from conductor.columns import PrefillTable, Seat
from conductor.events import Load
from conductor.ledger import PrefillQueue
from conductor.limits import Limits
from conductor.policies.base import Offers, Prompt, Weighed, predict_unfetched
from conductor.state import ConductorState
from protocol.ids import RequestId
from protocol.request import Placement
from protocol.wire import placement_from_wire, placement_to_wire
from tests.conductor.cluster import PREFILL, Cluster, endpoint


class ShortestFirst:
    """A prompt yields by its length in seconds, and the wait that it is told is the one of that rank."""

    name = "shortest-first"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: Offers) -> Weighed:
        weighed = predict_unfetched(prompt, offers)
        rank = np.full(len(offers.identity), float(prompt.num_tokens))
        waits = np.array([offers.wait_s(row, float(rank[row])) for row in range(len(rank))])
        ttft_s = weighed.ttft_s - offers.queue_s + waits
        return weighed._replace(ttft_s=ttft_s, score=ttft_s, rank=rank, queue_s=waits)


def ranked() -> Cluster:
    cluster = Cluster()
    limits = Limits(ttft_slo_s=1000.0, tbt_slo_s=1000.0)
    cluster.state = ConductorState(ShortestFirst(), limits)
    cluster.prefill("p0")
    cluster.decode("d0")
    return cluster


def test_a_policys_rank_is_what_waits_are_predicted_by_and_what_the_placement_carries() -> None:
    cluster = ranked()
    cluster.place("running", tokens=300)  # 10 ms per token
    cluster.place("long", tokens=500)
    short = cluster.place("short", tokens=100)
    assert short.rank == 100.0
    assert short.predicted_ttft_s == pytest.approx(3.0 + 1.0), "before the long one"
    assert cluster.place("longest", tokens=600).predicted_ttft_s == pytest.approx(9.0 + 6.0)
    decided = cluster.state.explain(RequestId("short"))
    assert decided is not None
    assert decided.rank == 100.0
    assert decided.prefill_candidates[0].queue_s == pytest.approx(3.0)


def test_a_placement_keeps_its_rank_on_the_wire() -> None:
    placement = Placement(
        request_id=RequestId("r"), prefill=endpoint("p"), decode=endpoint("d"), rank=2.5
    )
    assert placement_from_wire(placement_to_wire(placement)) == placement


def test_a_prompt_yields_only_to_those_that_come_within_its_rank() -> None:
    """So that nobody starves, and equal ranks are the order of arrival."""
    table = PrefillTable()
    queue = PrefillQueue(Seat(table, table.append()))
    queue.add(RequestId("running"), 4.0, 100, 0.0)
    queue.add(RequestId("patient"), 1.0, 100, 0.0, rank=10.0)
    assert queue.wait_s(3.0, rank=6.0) == pytest.approx(1.0)
    assert queue.look(3.0, rank=6.0) == (pytest.approx(1.0), 1)
    assert queue.wait_s(3.0, rank=7.0) == pytest.approx(2.0), "arrived later, yields as much"
    assert queue.look(3.0, rank=7.0) == (pytest.approx(2.0), 0)
    assert queue.wait_s(11.0, rank=0.0) == pytest.approx(1.0), "too late to be yielded to"


def test_a_heartbeat_takes_out_what_goes_first_by_rank() -> None:
    """Three settled prompts, tokens of one left: it is the one that would run last, placed when it may have been."""
    table = PrefillTable()
    queue = PrefillQueue(Seat(table, table.append()))
    for name, rank in (("first", 9.0), ("last", 8.0), ("middle", 1.0)):
        queue.add(RequestId(name), 1.0, 100, 0.0, rank)
    queue.correct(Load(queued_tokens=100), PREFILL, 10.0)
    assert "last" in queue
    assert len(queue) == 1
    assert queue.wait_s(10.5, rank=0.0) == pytest.approx(0.5)
    queue.validate()
