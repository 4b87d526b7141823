"""Tests of fairness between tenants: virtual service clock, queue places by turn, and whose requests are rejected."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.conductor.events import Placed
from moonserve.conductor.placement.admission import LOAD_REASONS, TENANT_SHARE
from moonserve.conductor.placement.policies import POLICY_NAMES
from moonserve.conductor.placement.tenant_fairness import MAX_CLAIMS, OUTPUT_WEIGHT, Fairness, parse_weights
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import RequestId, RequestPhase
from tests.conductor.cluster import Cluster, chain, shown

HERE = np.array([0])
NEAR = pytest.approx
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])
LENGTHS = st.integers(1, 400)


class Queue:
    """One machine that computes one prompt token per second, in the order given by `Fairness`. There are no outputs."""

    def __init__(self, **weights: float) -> None:
        self.fairness = Fairness(weights)
        self.waiting: list[tuple[float, int]] = []
        self.jobs: list[tuple[str, int, float]] = []  # tenant, tokens, tag
        self.served: dict[str, int] = dict.fromkeys(weights, 0)
        self.now = 100.0

    def submit(self, tenant: str, tokens: int) -> None:
        number, turn = len(self.jobs), self.fairness.standing(tenant)
        places = self.fairness.places_to_take(turn, 0, HERE)
        place = self.now if places is None else min(self.now, float(places[0]))
        begin(self.fairness, str(number), tenant, tokens, place=place)
        self.waiting.append((place, number))
        self.jobs.append((tenant, tokens, turn.tag))
        self.now += 1e-3

    def serve(self) -> int:
        """Serves the next prompt to its end and returns its number."""
        self.waiting.sort()
        _, number = self.waiting.pop(0)
        tenant, tokens, _ = self.jobs[number]
        self.now += tokens
        self.fairness.prefilled(RequestId(str(number)))
        self.fairness.settle(RequestId(str(number)), 0)
        self.fairness.validate()
        self.served[tenant] = self.served.get(tenant, 0) + tokens
        return number

    def has_waiting(self, tenant: str) -> bool:
        return any(self.jobs[number][0] == tenant for _, number in self.waiting)


def begin(fairness: Fairness, name: str, tenant: str, prompt: int, output: float = 0, place: float = 0.0) -> RequestId:
    fairness.charge(
        request_id := RequestId(name),
        fairness.standing(tenant),
        prompt_tokens=prompt,
        output_tokens=output,
        place=place,
        link=0,
        priority=0,
    )
    fairness.validate()
    return request_id


@given(
    st.lists(LENGTHS, min_size=1, max_size=40),
    st.lists(LENGTHS, min_size=1, max_size=40),
    WEIGHTS,
    WEIGHTS,
    st.randoms(use_true_random=False),
)
def test_always_waiting_tenants_share_by_weight(
    a: list[int], b: list[int], weight_a: float, weight_b: float, order: random.Random
) -> None:
    """While both tenants have prompts waiting, their weighted service differs by at most one prompt of each."""
    queue = Queue(a=weight_a, b=weight_b)
    both = [("a", n) for n in a] + [("b", n) for n in b]
    order.shuffle(both)
    for tenant, tokens in both:
        queue.submit(tenant, tokens)
    bound = max(a) / weight_a + max(b) / weight_b
    while queue.has_waiting("a") and queue.has_waiting("b"):
        queue.serve()
        assert abs(queue.served["a"] / weight_a - queue.served["b"] / weight_b) <= bound


@pytest.mark.parametrize("tenants", ["abc", "a"])
@given(data=st.data())
def test_lowest_tag_is_served_first_and_each_tenant_in_order(tenants: str, data: st.DataObject) -> None:
    """The least tag is served first, so no tenant starves: tags grow with service. A tenant alone overtakes no prompt.
    A step of None serves the next prompt."""
    steps = data.draw(st.lists(st.tuples(st.sampled_from(tenants), LENGTHS) | st.none(), max_size=60))
    queue = Queue(a=1.0, b=2.0, c=0.5)
    last: dict[str, int] = {}
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            places = queue.fairness.places_to_take(queue.fairness.standing(step[0]), 0, HERE)
            assert places is None or tenants != "a"
            queue.submit(*step)
        elif queue.waiting:
            least = min(queue.jobs[number][2] for _, number in queue.waiting)
            number = queue.serve()
            tenant, _, tag = queue.jobs[number]
            assert tag == least
            assert last.get(tenant, -1) < number
            last[tenant] = number
    assert not queue.waiting


@pytest.mark.parametrize("always", [False, True])
def test_idle_tenant_saves_no_credit(always: bool) -> None:
    """A tenant gets no credit for idle time. `always`: at every moment a prompt of the other tenant waits."""
    queue = Queue()
    for _ in range(10):
        queue.submit("busy", 100)
        if not always or len(queue.waiting) > 1:
            queue.serve()
    if not always:
        queue.submit("busy", 100)
    assert queue.fairness.standing("new").tag == queue.fairness.standing("new").served
    for tenant in ("busy", "new", "busy", "new"):
        queue.submit(tenant, 100)
    order = [queue.jobs[queue.serve()][0] for _ in range(5)]
    assert order in (["busy", "new", "busy", "new", "busy"], ["busy", "new", "new", "busy", "busy"])


def test_tenant_is_charged_for_actual_answers_and_not_for_uncomputed_prompts() -> None:
    fairness = Fairness({"a": 2.0})
    begin(fairness, "else", "b", 10**6)  # keeps a prompt waiting throughout
    first = begin(fairness, "first", "a", 100, 10)
    assert fairness.standing("a").tag == (100 + OUTPUT_WEIGHT * 10) / 2.0
    assert fairness.standing("a").in_flight == 100 + OUTPUT_WEIGHT * 10
    fairness.prefilled(first)
    fairness.settle(first, 50)
    assert fairness.standing("a").tag == (100 + OUTPUT_WEIGHT * 50) / 2.0
    second = begin(fairness, "second", "a", 1000)
    begin(fairness, "third", "a", 10)
    fairness.settle(second)
    tag = fairness.standing("a").tag
    assert tag == NEAR((100 + OUTPUT_WEIGHT * 50 + 1000) / 2.0), "of those that wait"
    begin(fairness, "fourth", "a", 1)
    assert fairness.standing("a").tag < tag + 20, "from then on it counts no more"
    assert fairness.standing("a").in_flight == 11


def test_prompts_of_a_lost_instance_delay_no_other() -> None:
    fairness = Fairness({})
    requests = [begin(fairness, f"r{number}", "a", 100) for number in range(3)]
    fairness.drop_instance(0)
    fairness.validate()
    assert not any(map(fairness.waits, requests))
    assert fairness.standing("b").tag == fairness.standing("a").tag, "all begin anew"
    fairness.settle(requests[1], 0)
    fairness.validate()


def test_claim_lasts_until_it_is_used_or_expires() -> None:
    fairness = Fairness({"b": 0.5})
    begin(fairness, "r0", "a", 100)
    fairness.claim("b", 10.0, 1.0)
    assert fairness.claimed_until(fairness.standing("a"), 11.0) == 12.0
    assert fairness.claimed_until(fairness.standing("a"), 12.0) is None, "too old"
    assert fairness.claimed_until(fairness.standing("b"), 11.0) is None, "its own"
    begin(fairness, "r1", "b", 60)
    assert fairness.claimed_until(fairness.standing("a"), 11.0) is None, "used"
    fairness.claim("b", 11.0, 1.0)
    assert fairness.claimed_until(fairness.standing("a"), 11.0) is None, "120 weighted tokens are more"


def test_claims_and_tenants_without_requests_take_no_memory() -> None:
    fairness = Fairness({})
    begin(fairness, "always", "a", 10**9)
    for number in range(3000):
        fairness.claim(f"t{number}", 0.0, 1.0)
        turn, request_id = fairness.standing(f"t{number}"), RequestId(f"r{number}")
        fairness.charge(request_id, turn, prompt_tokens=1, output_tokens=0, place=0.0, link=0, priority=0)
        fairness.prefilled(request_id)
        fairness.settle(request_id, 0)
    fairness.validate()
    assert len(fairness._claims) <= MAX_CLAIMS
    fairness.settle(RequestId("always"))
    fairness.validate()
    assert not fairness._accounts


def test_tenant_weights_are_validated() -> None:
    assert parse_weights(["alice=2", "a=b=0.5"]) == {"alice": 2.0, "a=b": 0.5}
    for wrong in (["alice"], ["=2"], ["a=0"], ["a=-1"], ["a=nan"], ["a=inf"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="tenant-weights"):
            parse_weights(wrong)


def placed(cluster: Cluster, request_id: str, tenant: str = "", **changes: object) -> Any:
    reply = cluster.ask(request_id, tenant=tenant, **changes)
    assert isinstance(reply, Placed), reply
    cluster.now += 1e-3
    return shown(reply.decision)


def test_quiet_tenant_goes_before_a_flood_and_its_prediction_says_so() -> None:
    """A quiet tenant's prompt waits, and is predicted to wait, for the running prompt and at most one more, 1 s each.
    Requests without a tenant count as one tenant."""
    cluster = Cluster("p0", "d0")
    for number in range(20):
        assert placed(cluster, f"flood{number}").rank == 0.0, "in order of arrival"
    quiet = placed(cluster, "quiet", "quiet")
    assert quiet.rank < 0.0, "before who came earlier"
    assert quiet.predicted_ttft_s <= 2.0 + 1.0
    assert quiet.prefill_candidates[0].queue_s == NEAR(quiet.predicted_ttft_s - 1.0)
    assert (quiet.turn.tenant, quiet.turn.ahead_tokens) == ("quiet", 0.0)
    late = placed(cluster, "flood20")
    assert late.rank == 0.0
    assert late.turn.ahead_tokens == NEAR(20 * (100 + 2 * late.expected_output))
    assert late.predicted_ttft_s > 20.0, "behind all that is there"
    cluster.prefill("p1")  # an empty queue has no prompt to overtake
    other = placed(cluster, "other", "other")
    assert (other.prefill, other.rank, other.prefill_candidates[1].queue_s) == ("p1", 0.0, 0.0)
    assert 0.0 < other.prefill_candidates[0].queue_s < 4.0


def test_policy_sees_waits_within_the_tenants_limits() -> None:
    """A policy with ranks sees waits in turn: a quiet tenant goes first, although all prompts yield for 5 s."""
    cluster = Cluster("p0", "d0", policy="moonserve")
    for number in range(10):
        placed(cluster, f"flood{number}", "flood")
    assert placed(cluster, "quiet", "quiet").prefill_candidates[0].queue_s <= 2.0


def test_weights_decide_how_many_prompts_go_first() -> None:
    """When two tenants flood the queue at one instant, three of four prompts served are of the tenant with weight 3."""
    cluster = Cluster("p0", "d0", tenant_weights={"b": 3.0})
    for tenant in "ab":
        for number in range(40):
            assert isinstance(cluster.ask(f"{tenant}{number}", tenant=tenant), Placed)
    instance = cluster.state._members.find("p0")
    assert instance is not None
    order = [job.request_id for job in instance.queue._in_order()][:32]
    assert 22 <= sum(name.startswith("b") for name in order) <= 25


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_single_tenant_is_placed_as_without_fairness(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone tenant's decisions are the same without turns, except for the recorded turn, which matters to others."""

    def history(tenant: str) -> list[str]:
        draw = random.Random(3)
        cluster = Cluster(policy=policy, ttft_slo_s=30.0, lease_s=1e6, validates=False)
        for number in range(3):
            cluster.store(f"s{number}")
            cluster.prefill(f"p{number}", home_store=f"s{number}")
        cluster.decode("d0")
        cluster.heartbeat("s1", holds=chain("x", 8))
        told = []
        for number in range(25):
            cluster.now += draw.random()
            tokens = draw.randrange(50, 600)
            wish = {"num_prompt_tokens": tokens, "block_keys": chain(draw.choice("xy"), min(tokens // 10, 8))}
            reply = cluster.ask(f"r{number}", tenant=tenant, **wish)
            told.append(repr(reply).replace(repr(reply.decision.turn), ""))  # type: ignore[union-attr]
            if number > 5 and draw.random() < 0.6:
                cluster.report(f"r{number - 5}", RequestPhase.FIRST_TOKEN, prefill_s=1.0)
                cluster.report(f"r{number - 5}", RequestPhase.FINISHED, output_tokens=7)
        return told

    with_turns = history("only")
    monkeypatch.setattr(Fairness, "places_to_take", lambda *_: None)
    assert with_turns == history("other")


@pytest.mark.parametrize(("by_priority", "urgent_s", "usual_s"), [(False, 9.99, 10.989), (True, 0.99, 5.989)])
def test_a_priority_counts_only_where_worker_queues_have_it(by_priority: bool, urgent_s: float, usual_s: float) -> None:
    """Requests come 10 ms after the first prompt, which is not interrupted, since a step is longer than the prompt."""
    cluster = Cluster("p0", "d0", by_priority=by_priority)
    for number in range(10):
        placed(cluster, f"r{number}", priority=number % 2)
    urgent = placed(cluster, "urgent", priority=-(10**9))
    assert urgent.rank == 0.0, "the worker has the priority itself"
    assert urgent.prefill_candidates[0].queue_s == NEAR(urgent_s)
    # Behind its own priority and before the less urgent one.
    assert placed(cluster, "usual").prefill_candidates[0].queue_s == NEAR(usual_s)


def test_fairness_holds_among_equal_priorities() -> None:
    """A flood of urgent prompts goes before a quiet tenant's normal one, and still counts as its tenant's service."""
    cluster = Cluster("p0", "d0", by_priority=True)
    for number in range(10):
        placed(cluster, f"urgent{number}", "flood", priority=-1)
    assert placed(cluster, "quiet", "quiet").rank == 0.0
    assert placed(cluster, "flood", "flood").turn.ahead_tokens > 0.0
    assert placed(cluster, "quiet2", "quiet").rank < 0.0, "before the flood's usual one"


def crowded() -> Cluster:
    """Returns a cluster that tenant a filled to the TBT objective; then b was rejected and one request of a ended."""
    cluster = Cluster("p0", "p1", "p2", "p3", "d0", ttft_slo_s=1e6, tbt_slo_s=0.055)
    number = 0
    while ask(cluster, f"a{number}", "a") == "placed":
        cluster.report(f"a{number}", RequestPhase.FIRST_TOKEN)
        number += 1
    assert 1 < number < 10
    assert ask(cluster, "b0", "b") == "tbt_slo"
    cluster.report("a0", RequestPhase.FINISHED, output_tokens=1)
    return cluster


def ask(cluster: Cluster, request_id: str, tenant: str) -> str:
    reply = cluster.ask(request_id, tenant=tenant, max_tokens=1000)
    return "placed" if isinstance(reply, Placed) else reply.reason  # type: ignore[union-attr]


def test_free_capacity_under_overload_goes_to_the_tenant_with_less_in_flight() -> None:
    cluster = crowded()
    rejected = cluster.reject("a100", tenant="a", max_tokens=1000)
    assert rejected.reason == cluster.explain("a100").rejection.reason == TENANT_SHARE
    assert TENANT_SHARE not in LOAD_REASONS, "which is no claim"
    assert 0.0 < rejected.retry_after_s <= 10.0
    assert ask(cluster, "b1", "b") == "placed"
    assert ask(cluster, "a101", "a") in LOAD_REASONS, "the claim is used, and there is no room"


def test_stricter_objective_than_others_gives_no_claim() -> None:
    cluster = crowded()
    assert ask(cluster, "b1", "b") == "placed"
    cluster.report("b1", RequestPhase.CANCELLED)
    assert cluster.reject("b2", tenant="b", max_tokens=1000, tbt_slo_s=0.02).reason == "tbt_slo"
    assert ask(cluster, "a100", "a") == "placed"
