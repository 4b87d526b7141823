"""Turns and priorities in placements: where a prompt waits, what is predicted of it, and who is rejected first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from conductor.admission import FOR_LOAD, TENANT_SHARE
from conductor.decision import Decision
from conductor.events import Phase, Place, Placed
from conductor.fairness.shares import Fairness
from conductor.limits import Limits
from conductor.policies import POLICY_NAMES
from protocol.ids import RequestId
from tests.conductor.cluster import Cluster, chain, pair

USUAL = Limits(ttft_slo_s=1000.0, tbt_slo_s=1000.0, lease_s=1e6)


def placed(cluster: Cluster, request_id: str, tenant: str = "", **changes: object) -> Decision:
    reply = cluster.ask(request_id, tenant=tenant, **changes)
    assert isinstance(reply, Placed), reply
    cluster.now += 1e-3
    return reply.decision


def test_a_quiet_tenant_goes_before_a_flood_and_is_promised_what_that_means() -> None:
    """Prompts take a second each. The quiet one waits for the one that runs and for one more at most."""
    cluster = pair()
    for number in range(20):
        assert placed(cluster, f"flood{number}", "flood").rank == 0.0, "in order of arrival"
    quiet = placed(cluster, "quiet", "quiet")
    assert quiet.rank < 0.0, "before who came earlier"
    assert quiet.predicted_ttft_s <= 2.0 + 1.0
    assert quiet.prefill_candidates[0].queue_s == pytest.approx(quiet.predicted_ttft_s - 1.0)
    assert quiet.turn.tenant == "quiet"
    assert quiet.turn.ahead_tokens == 0.0
    late = placed(cluster, "flood20", "flood")
    assert late.rank == 0.0
    assert late.turn.ahead_tokens == pytest.approx(20 * (100 + 2 * late.expected_output))
    assert late.predicted_ttft_s > 20.0, "behind all that is there"
    assert '"ahead_tokens"' in late.to_json()


def test_weights_decide_how_many_go_before() -> None:
    """Of a flood of each, all at one instant, the tenant of weight 3 gets three of four prompts."""
    cluster = Cluster(limits=replace(USUAL, tenant_weights={"b": 3.0}))
    cluster.prefill("p0")
    cluster.decode("d0")
    for tenant in "ab":
        for number in range(40):
            assert isinstance(cluster.ask(f"{tenant}{number}", tenant=tenant), Placed)
    instance = cluster.state._members.find("p0")
    assert instance is not None
    order = instance.queue._work.in_order()[:32]
    assert 22 <= sum(name.startswith("b") for name in order) <= 25


def test_a_flood_at_one_machine_is_passed_there_and_an_idle_machine_takes_the_prompt() -> None:
    """Nobody waits at the second one, so there is no place to take and nothing to wait for."""
    cluster = pair()
    for number in range(5):
        placed(cluster, f"flood{number}", "flood")
    cluster.prefill("p1")
    quiet = placed(cluster, "quiet", "quiet")
    assert quiet.prefill == "p1"
    assert quiet.rank == 0.0
    waits_s = [each.queue_s for each in quiet.prefill_candidates]
    assert 0.0 < waits_s[0] < 3.0, "behind the one that runs and one more at most, not behind five"
    assert waits_s[1] == 0.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_one_tenant_alone_is_placed_as_if_there_were_no_turns(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever it is. Decisions are compared whole but for the tag, which is what would count if another one came."""

    def history(tenant: str) -> list[str]:
        random_ = random.Random(3)
        cluster = Cluster(policy=policy, limits=replace(USUAL, ttft_slo_s=30.0))
        for name in ("p0", "p1", "p2"):
            cluster.store(f"s{name[1]}")
            cluster.prefill(name, home=f"s{name[1]}")
        cluster.decode("d0")
        cluster.heartbeat("s1", holds=chain("x", 8))
        told = []
        for number in range(60):
            cluster.now += random_.random()
            tokens = random_.randrange(50, 600)
            keys = chain(random_.choice("xy"), min(tokens // 10, 8))
            reply = cluster.ask(
                f"r{number}", tenant=tenant, num_prompt_tokens=tokens, block_keys=keys
            )
            told.append(repr(reply).replace(repr(reply.decision.turn), ""))  # type: ignore[union-attr]
            if number > 5 and random_.random() < 0.6:
                cluster.report(f"r{number - 5}", Phase.FIRST_TOKEN, prefill_s=1.0)
                cluster.report(f"r{number - 5}", Phase.FINISHED, output_tokens=7)
        return told

    with_turns = history("only")
    monkeypatch.setattr(Fairness, "places_to_take", lambda *_: None)
    assert with_turns == history("only") == history("other")


def test_a_priority_counts_only_where_the_workers_queues_have_it() -> None:
    for by_priority in (False, True):
        cluster = Cluster(limits=replace(USUAL, by_priority=by_priority))
        cluster.prefill("p0")
        cluster.decode("d0")
        for number in range(10):
            placed(cluster, f"r{number}", priority=number % 2)
        urgent = placed(cluster, "urgent", priority=-(10**9))
        assert urgent.rank == 0.0, "the worker has the priority itself"
        waits_s = 0.99 if by_priority else 9.99  # 10 ms after the first
        # What runs is interrupted after a step, which here is longer than the prompt.
        assert urgent.prefill_candidates[0].queue_s == pytest.approx(waits_s)
        usual = placed(cluster, "usual")
        assert usual.prefill_candidates[0].queue_s == pytest.approx(
            5.989 if by_priority else 10.989
        ), "behind its own priority, before the less urgent"


def test_turns_are_among_equal_priorities() -> None:
    """A flood of urgent prompts goes before a quiet tenant's usual one, and counts as service all the same."""
    cluster = Cluster(limits=replace(USUAL, by_priority=True))
    cluster.prefill("p0")
    cluster.decode("d0")
    for number in range(10):
        placed(cluster, f"urgent{number}", "flood", priority=-1)
    assert placed(cluster, "quiet", "quiet").rank == 0.0
    flood = placed(cluster, "flood", "flood")
    assert flood.turn.ahead_tokens > 0.0
    assert placed(cluster, "quiet2", "quiet").rank < 0.0, "before the flood's usual one"


def crowded() -> Cluster:
    """As many sequences of one tenant as the objective allows, and another one turned away."""
    cluster = Cluster(limits=Limits(ttft_slo_s=1e6, tbt_slo_s=0.055, lease_s=1e6))
    for name in ("p0", "p1", "p2", "p3"):
        cluster.prefill(name)
    cluster.decode("d0")
    number = 0
    while isinstance(cluster.ask(f"a{number}", tenant="a", max_tokens=1000), Placed):
        cluster.report(f"a{number}", Phase.FIRST_TOKEN)
        number += 1
        assert number < 10
    assert number > 1
    assert cluster.reject("b0", tenant="b", max_tokens=1000).reason == "tbt_slo"
    cluster.report("a0", Phase.FINISHED, output_tokens=1)
    return cluster


def ask(cluster: Cluster, request_id: str, tenant: str) -> str:
    reply = cluster.ask(request_id, tenant=tenant, max_tokens=1000)
    return "placed" if isinstance(reply, Placed) else reply.reason  # type: ignore[union-attr]


def test_what_frees_up_under_overload_is_for_who_was_rejected_with_less() -> None:
    cluster = crowded()
    rejected = cluster.reject("a100", tenant="a", max_tokens=1000)
    assert rejected.reason == TENANT_SHARE
    assert rejected.reason not in FOR_LOAD, "which is no claim"
    assert 0.0 < rejected.retry_after_s <= 10.0
    decision = cluster.state.explain(RequestId("a100"))
    assert decision is not None
    assert decision.rejection is not None
    assert decision.rejection.reason == TENANT_SHARE
    assert ask(cluster, "b1", "b") == "placed"
    assert ask(cluster, "a101", "a") in FOR_LOAD, "the claim is used, and there is no room"


def test_who_does_not_come_back_loses_the_claim() -> None:
    cluster = crowded()
    rejected = cluster.reject("a100", tenant="a", max_tokens=1000)
    cluster.now += rejected.retry_after_s
    assert ask(cluster, "a101", "a") == "placed"


def test_who_asks_for_more_than_others_are_held_to_claims_nothing() -> None:
    cluster = crowded()
    assert ask(cluster, "b1", "b") == "placed"
    cluster.report("b1", Phase.CANCELLED)
    assert cluster.reject("b2", tenant="b", max_tokens=1000, tbt_slo_s=0.02).reason == "tbt_slo"
    assert ask(cluster, "a100", "a") == "placed"


def test_a_place_without_a_tenant_is_a_tenant_too() -> None:
    cluster = pair()
    for number in range(5):
        placed(cluster, f"r{number}")
    named = placed(cluster, "named", "n")
    assert named.rank < 0.0
    assert Place.__dataclass_fields__["tenant"].default == ""
