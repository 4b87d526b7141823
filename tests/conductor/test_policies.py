"""What each placement policy promises, besides Algorithm 1 (`test_algorithm1`), and changing them while serving."""

from __future__ import annotations

from collections import Counter

import pytest

from conductor.events import (
    BlockChanges,
    Deregister,
    Heartbeat,
    Load,
    Phase,
    PolicySwitched,
    Refused,
    SwitchPolicy,
)
from conductor.limits import Limits
from conductor.policies import POLICY_NAMES, make_policy
from conductor.session import LEAST_FORK
from conductor.state import ConductorState
from protocol.errors import InvalidRequest
from protocol.ids import InstanceId, RequestId
from protocol.keys import BlockKey
from tests.conductor.cluster import Cluster, chain

SHARED = chain("a", 20)


def four(policy: str) -> Cluster:
    """Four prefill instances, each with a store beside it."""
    cluster = Cluster(policy=policy)
    for i in range(4):
        cluster.store(f"s{i}", host=f"h{i}")
        cluster.prefill(f"p{i}", host=f"h{i}", home=f"s{i}")
    cluster.decode("d0")
    return cluster


def placed_and_ended(cluster: Cluster, request_id: str, **changes: object) -> str:
    reply = cluster.ask(request_id, **changes)
    cluster.report(request_id, Phase.CANCELLED)
    return str(reply.placement.prefill.instance_id)  # type: ignore[union-attr]


def test_random_gives_every_instance_about_as_many_and_the_same_request_the_same() -> None:
    cluster, again = four("random"), four("random")
    chosen = [placed_and_ended(cluster, f"r{i}") for i in range(400)]
    assert min(Counter(chosen).values()) > 70
    assert chosen[::-1] == [placed_and_ended(again, f"r{i}") for i in reversed(range(400))]


def test_random_depends_on_its_seed_and_spreads_what_an_excluded_instance_had() -> None:
    cluster, other = four("random"), four("random")
    other.send(SwitchPolicy(name="random", balancing_threshold=1.0, seed=1))
    first = [placed_and_ended(cluster, f"r{i}") for i in range(100)]
    assert first != [placed_and_ended(other, f"r{i}") for i in range(100)]
    without = frozenset({"p0"})
    second = [placed_and_ended(cluster, f"r{i}", excluded_instances=without) for i in range(100)]
    moved = [b for a, b in zip(first, second, strict=True) if a == "p0"]
    assert {b for a, b in zip(first, second, strict=True) if a == b} == {"p1", "p2", "p3"}
    assert all(a == b for a, b in zip(first, second, strict=True) if a != "p0")
    assert set(moved) == {"p1", "p2", "p3"}


def test_round_robin_takes_turns_whatever_the_queues_and_prefixes() -> None:
    cluster = four("round-robin")
    cluster.heartbeat("p2", Load(num_waiting=1, queued_tokens=500), holds=SHARED[:9])
    turns = [cluster.place(f"r{i}", keys=SHARED[:10]).prefill.instance_id for i in range(8)]
    assert turns == ["p0", "p1", "p2", "p3"] * 2


def test_local_cache_aware_weighs_what_it_has_and_fetches_nothing() -> None:
    cluster = four("local-cache-aware")
    cluster.heartbeat("s1", holds=SHARED[:9])
    first = cluster.place("r0", keys=SHARED[:10])
    second = cluster.place("r1", keys=SHARED[:10])
    third = cluster.place("r2", keys=SHARED[:10], excluded=frozenset({"p1"}))
    assert first.prefill.instance_id == second.prefill.instance_id == "p1"
    assert third.prefix_sources == ()
    assert third.predicted_ttft_s == pytest.approx(1.0), "computed, although s1 could send it"


def test_a_session_stays_with_its_instance_and_others_do_not_move_it() -> None:
    cluster = four("session-affinity")
    homes = {s: placed_and_ended(cluster, f"r{s}", session_id=str(s)) for s in range(40)}
    assert set(homes.values()) == {"p0", "p1", "p2", "p3"}
    cluster.prefill("p4")
    after = {s: placed_and_ended(cluster, f"q{s}", session_id=str(s)) for s in range(40)}
    moved = {s for s in homes if after[s] != homes[s]}
    assert {after[s] for s in moved} == {"p4"}, "an instance that joins takes only what it wins"
    assert 0 < len(moved) < 20
    cluster.send(Deregister(instance_id=InstanceId("p4"), epoch=1))
    assert homes == {s: placed_and_ended(cluster, f"t{s}", session_id=str(s)) for s in range(40)}


def test_a_session_leaves_an_overloaded_instance_and_comes_back() -> None:
    cluster = four("session-affinity")
    home = placed_and_ended(cluster, "r0", session_id="x")
    cluster.heartbeat(home, Load(num_waiting=1, queued_tokens=900))
    away = placed_and_ended(cluster, "r1", session_id="x")
    assert away != home
    assert placed_and_ended(cluster, "r2", session_id="x") == away, "to the same other one"
    cluster.heartbeat(home, Load(queued_tokens=0))
    assert placed_and_ended(cluster, "r3", session_id="x") == home


def test_without_a_session_id_the_block_behind_the_common_ones_tells_the_conversation() -> None:
    cluster = four("session-affinity")
    system = SHARED[:3]
    conversations = [system + chain(f"c{i}", 4) for i in range(LEAST_FORK + 1)]
    announce(cluster, "s0", conversations)
    for i in range(20):
        first = system + chain(f"new{i}", 2)
        turns = [first, first + chain(f"more{i}", 2), first + chain(f"most{i}", 4)]
        chosen = {
            placed_and_ended(cluster, f"r{i}-{n}", block_keys=keys, num_prompt_tokens=95)
            for n, keys in enumerate(turns)
        }
        assert len(chosen) == 1
    homes = {
        placed_and_ended(cluster, f"q{i}", block_keys=system + chain(f"other{i}", 2))
        for i in range(20)
    }
    assert len(homes) == 4, "what they have in common does not tie them"


def announce(cluster: Cluster, name: str, chains: list[tuple[BlockKey, ...]]) -> None:
    """With parents, as instances do."""
    pairs = [pair for keys in chains for pair in zip(keys[1:], keys, strict=False)]
    changes = BlockChanges(first_seq=1, next_seq=1 + len(pairs), added=tuple(pairs))
    cluster.send(Heartbeat(instance_id=InstanceId(name), epoch=1, load=Load(), changes=changes))


def test_another_policy_decides_from_the_next_placement_on_and_decisions_say_which() -> None:
    cluster = four("round-robin")
    cluster.heartbeat("p3", holds=SHARED[:9])
    cluster.place("r0", keys=SHARED[:10])
    reply = cluster.send(SwitchPolicy(name="global-cache-aware", balancing_threshold=1.5))
    assert reply == [PolicySwitched(name="global-cache-aware", balancing_threshold=1.5)]
    assert cluster.place("r1", keys=SHARED[:10]).prefill.instance_id == "p3"
    before, after = (cluster.state.explain(RequestId(name)) for name in ("r0", "r1"))
    assert before is not None
    assert after is not None
    assert (before.policy, before.balancing_threshold) == ("round-robin", None)
    assert (after.policy, after.balancing_threshold) == ("global-cache-aware", 1.5)


@pytest.mark.parametrize(
    "wrong",
    [
        SwitchPolicy(name="nonsense", balancing_threshold=2.0),
        SwitchPolicy(name="global-cache-aware", balancing_threshold=0.5),
    ],
)
def test_a_policy_that_cannot_be_is_refused_and_the_old_one_stays(wrong: SwitchPolicy) -> None:
    cluster = four("round-robin")
    (reply,) = cluster.send(wrong)
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, InvalidRequest)
    turns = [cluster.place(f"r{i}").prefill.instance_id for i in range(4)]
    assert turns == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_closed_instance_is_never_chosen(name: str) -> None:
    """Draining or excluded: the rows that are left stand for the right instances."""
    cluster = four(name)
    cluster.heartbeat("p1", draining=True)
    without = frozenset({"p2"})
    chosen = {placed_and_ended(cluster, f"r{i}", excluded_instances=without) for i in range(30)}
    assert chosen <= {"p0", "p3"}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_an_instance_that_leaves_takes_its_row_with_it(name: str) -> None:
    """Reports for the dead reach nobody else, and the rows behind it keep their figures."""
    cluster = four(name)
    chosen = {f"r{i}": cluster.place(f"r{i}").prefill.instance_id for i in range(8)}
    cluster.send(Deregister(instance_id=InstanceId("p1"), epoch=1))
    for request_id in chosen:
        cluster.report(request_id, Phase.FINISHED)
    assert cluster.place("last").predicted_ttft_s == pytest.approx(1.0)


def test_decisions_are_bounded_in_bytes_and_the_newest_stays() -> None:
    limits = Limits(ttft_slo_s=1e6, tbt_slo_s=1e6, decision_bytes=1)
    cluster = Cluster(limits=limits)
    cluster.prefill("p0")
    cluster.decode("d0")
    for i in range(3):
        cluster.place(f"r{i}")
    kept = [cluster.state.explain(RequestId(f"r{i}")) is not None for i in range(3)]
    assert kept == [False, False, True]


def test_a_decision_does_not_change_with_the_cluster() -> None:
    """It keeps columns, but none that goes on living."""
    cluster = four("global-cache-aware")
    cluster.place("r0")
    explained = cluster.state.explain(RequestId("r0"))
    assert explained is not None
    before = explained.to_json()
    for i in range(1, 6):
        cluster.place(f"r{i}")
    cluster.heartbeat("d0", Load(free_blocks=7, num_running=3))
    cluster.prefill("p9")
    again = cluster.state.explain(RequestId("r0"))
    assert again is not None
    assert again.to_json() == before


def test_a_policy_is_a_function_of_the_prompt_and_the_offers() -> None:
    """Two states with one policy object between them decide as two with one each."""
    shared = make_policy("session-affinity", 1.0)
    states = [ConductorState(shared, Limits()) for _ in range(2)]
    own = ConductorState(make_policy("session-affinity", 1.0), Limits())
    clusters = []
    for state in (*states, own):
        cluster = Cluster()
        cluster.state = state
        for i in range(3):
            cluster.prefill(f"p{i}")
        cluster.decode("d0")
        clusters.append(cluster)
    wish = {"session_id": "x"}
    replies = [[placed_and_ended(c, f"r{i}", **wish) for i in range(5)] for c in clusters]
    assert replies[0] == replies[1] == replies[2]
