"""Tests of the placement policies: the guarantees of each one, and loading of user-defined policies.

A block is 10 tokens, a computed token takes 10 ms, a fetched block 1 ms.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.conductor.events import BlockChanges, Deregister, Heartbeat, Load
from moonserve.conductor.placement.admission import AdmissionMode
from moonserve.conductor.placement.decode_selection import lowest_score
from moonserve.conductor.placement.policies import POLICY_NAMES, make_policy
from moonserve.conductor.placement.policies.base import PrefillCandidates, Prompt, QueueWaits
from moonserve.conductor.placement.policies.baselines import LeastLoaded
from moonserve.conductor.placement.policies.least_added_delay import LeastAddedDelay
from moonserve.conductor.placement.prefix_lookup import MIN_FORK
from moonserve.conductor.prediction.instance_table import PrefillTable, RowRef
from moonserve.conductor.prediction.queue_time import PrefillQueue
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import InstanceId, Placement, RequestId, RequestPhase
from tests.conductor.cluster import Cluster, chain
from tests.thoroughness import examples

NEAR = pytest.approx
SHARED = chain("a", 20)


def offers(prefixes: Sequence[int], **columns: object) -> PrefillCandidates:
    """Returns the offers of one instance per prefix length. `columns` sets fields of `PrefillCandidates`."""
    own, ones = np.array(prefixes), np.ones(len(prefixes))
    made = PrefillCandidates(
        identity=np.arange(len(prefixes), dtype=np.uint64),
        chosen_at=np.zeros(len(prefixes), np.int64),
        device_blocks=own,
        prefix_blocks=own,
        queue_s=ones * 0.0,
        local_s_per_block=ones * 0.0001,
        remote_s_per_block=ones * 0.001,
        c0=ones * 0.0,
        c1=ones * 0.01,
        c2=ones * 0.0,
        now=0.0,
    )
    return made._replace(**columns)  # type: ignore[arg-type]


def of(
    num_prefills: int, policy: str, *, slo_s: float = 1000.0, admission: AdmissionMode = AdmissionMode.CURRENT
) -> Cluster:
    """Returns a cluster of prefill instances, each with a home store on its host, and one decode instance."""
    cluster = Cluster(policy=policy, ttft_slo_s=slo_s, lease_s=1e3, admission=admission)
    for i in range(num_prefills):
        cluster.store(f"s{i}", host=f"h{i}")
        cluster.prefill(f"p{i}", host=f"h{i}", home_store=f"s{i}")
    cluster.decode("d0", num_blocks=100_000)
    return cluster


def sources(placement: Placement) -> list[tuple[str, int, int]]:
    return [(s.store.instance_id, s.first_block, s.num_blocks) for s in placement.prefix_sources]


def ended(cluster: Cluster, request_id: str, **changes: object) -> str:
    """Places a request, cancels it at once and returns its prefill instance."""
    reply = cluster.ask(request_id, **changes)
    cluster.report(request_id, RequestPhase.CANCELLED)
    return str(reply.placement.prefill.instance_id)  # type: ignore[union-attr]


# ---- Algorithm 1 of the paper


@given(
    instances=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    best=st.integers(0, 20),
    threshold=st.sampled_from([1.0, 1.25, 2.0]),
)
@settings(max_examples=examples(300), deadline=None)
def test_global_cache_aware_decides_as_the_paper(
    instances: list[tuple[int, int, int, int]], best: int, threshold: float
) -> None:
    """Terms and choice equal Algorithm 1. Ties go to the least recently chosen instance, then to the first."""
    device = np.array([min(a, b) for a, b, _, _ in instances])
    prefix = np.array([max(a, b) for a, b, _, _ in instances])
    queue = np.array([q / 10 for _, _, q, _ in instances])
    chosen_at = np.array([c for *_, c in instances])
    weighed = make_policy("global-cache-aware", threshold).weigh(
        Prompt(num_tokens=250, block_size=10, best_blocks=best),
        offers(prefix, device_blocks=device, queue_s=queue, chosen_at=chosen_at),
    )
    expected = []
    for i, (own, queue_s) in enumerate(zip(prefix.tolist(), queue.tolist(), strict=True)):
        if (best / own if own else (math.inf if best else 0.0)) > threshold:
            reuse, transfer_s = best, (best - own) * 0.001
        else:
            reuse, transfer_s = own, 0.0
        load_s = (own - int(device[i])) * 0.0001  # from the home store into the device
        prefill_s = (250 - reuse * 10) * 0.01
        terms = [column[i] for column in weighed[:4]]
        assert terms == NEAR([reuse, load_s, transfer_s, prefill_s])
        assert weighed.ttft_s[i] == NEAR(load_s + transfer_s + queue_s + prefill_s)
        expected.append((float(weighed.ttft_s[i]), int(chosen_at[i]), i))
    assert lowest_score(weighed.score, chosen_at) == min(expected)[2]


def test_instance_that_holds_the_prefix_is_chosen() -> None:
    cluster = Cluster("p0", "p1", "d0")
    cluster.heartbeat("p1", holds=SHARED[:9])
    other = cluster.place("r0", keys=SHARED[:10], excluded_instances=frozenset({"p1"}))
    assert (sources(other), other.predicted_ttft_s) == ([], NEAR(1.0))
    placement = cluster.place("r1", keys=SHARED[:10])
    assert placement.prefill.instance_id == "p1"
    assert (sources(placement), placement.predicted_ttft_s) == ([], NEAR(0.1))


def test_the_last_token_is_always_computed() -> None:
    cluster = Cluster("p0", "d0")
    cluster.heartbeat("p0", holds=SHARED[:10])
    assert cluster.place("r0", keys=SHARED[:10], tokens=100).predicted_ttft_s == NEAR(0.1)
    cluster.report("r0", RequestPhase.FINISHED)
    assert cluster.place("r1", keys=SHARED[:10], tokens=101).predicted_ttft_s == NEAR(0.01)


@pytest.mark.parametrize(
    ("holds", "expected", "ttft_s"),
    [
        # The home store continues the device cache, even if it lacks the leading blocks.
        ({"p0": (0, 4), "s0": (4, 8)}, [("s0", 4, 4)], 4 * 1e6 / 5e9 + 0.2),
        # A remote store serves the blocks that the home store lacks. The home store comes first.
        ({"p0": (0, 1), "s0": (0, 3), "s1": (0, 9)}, [("s0", 1, 2), ("s1", 3, 6)], 2 * 1e6 / 5e9 + 6 * 0.001 + 0.1),
    ],
)
def test_prefixes_come_from_the_device_then_home_then_elsewhere(
    holds: dict[str, tuple[int, int]], expected: list[tuple[str, int, int]], ttft_s: float
) -> None:
    cluster = Cluster("d0", "s0", "s1")
    cluster.prefill("p0", host="host-of-s0", home_store="s0")
    for name, (first, end) in holds.items():
        cluster.heartbeat(name, holds=SHARED[first:end])
    placement = cluster.place("r0", keys=SHARED[:10])
    assert (sources(placement), placement.predicted_ttft_s) == (expected, NEAR(ttft_s))
    without = cluster.place("r1", keys=SHARED[:10], excluded_instances=frozenset({"s0", "s1"}))
    assert sources(without) == [], "excluded stores are not read from"


def test_reads_spread_over_the_holders_and_are_freed_by_the_first_token() -> None:
    cluster = Cluster("s0", "s1", "p0", "d0")
    for name in ("s0", "s1"):
        cluster.heartbeat(name, holds=SHARED[:9])
    read = [sources(cluster.place(f"r{i}", keys=SHARED[:10])) for i in range(2)]
    cluster.report("r0", RequestPhase.FIRST_TOKEN)
    read.append(sources(cluster.place("r2", keys=SHARED[:10])))
    assert read == [[(name, 0, 9)] for name in ("s0", "s1", "s0")]


def test_a_hot_prefix_is_copied_once_the_queue_at_its_holder_builds_up() -> None:
    cluster = of(2, "global-cache-aware")
    for name in ("p0", "s0"):
        cluster.heartbeat(name, holds=SHARED[:9])
    first, second = (cluster.place(f"r{i}", keys=SHARED[:10]) for i in range(2))
    assert first.prefill.instance_id == "p0"
    assert second.prefill.instance_id == "p1", "0.009 s of transfer beats 0.1 s of queue"
    assert sources(second) == [("s0", 0, 9)]


# ---- the simple ones


def test_random_depends_on_its_seed_and_spreads_what_an_excluded_instance_had() -> None:
    cluster, again, other = (of(4, "random") for _ in range(3))
    other.state._planner.policy = make_policy("random", 1.0, seed=1)
    first = [ended(cluster, f"r{i}") for i in range(100)]
    assert min(Counter(first).values()) > 15
    assert first[::-1] == [ended(again, f"r{i}") for i in reversed(range(100))], "by name alone"
    assert first != [ended(other, f"r{i}") for i in range(100)]
    without = frozenset({"p0"})
    second = [ended(cluster, f"r{i}", excluded_instances=without) for i in range(100)]
    pairs = list(zip(first, second, strict=True))
    assert all(a == b for a, b in pairs if a != "p0")
    assert {b for a, b in pairs if a == "p0"} == {"p1", "p2", "p3"}


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [
        ("round-robin", ["p0", "p1", "p2", "p3"] * 2),  # ignores queues and prefixes
        ("least-loaded", ["p0", "p1", "p3", "p0", "p1", "p3"]),  # ignores prefixes
        ("local-cache-aware", ["p2", "p2"]),
    ],
)
def test_simple_policies_choose_by_their_criterion(policy: str, chosen: list[str]) -> None:
    cluster = of(4, policy)
    load = None if policy == "local-cache-aware" else Load(num_waiting=1, queued_tokens=500)
    cluster.heartbeat("p2", load, holds=SHARED[:9])
    cluster.heartbeat("s2", holds=SHARED[:9])
    placed = [cluster.place(f"r{i}", keys=SHARED[:10]) for i in range(len(chosen))]
    assert [placement.prefill.instance_id for placement in placed] == chosen
    decided = cluster.explain("r0")
    assert (decided.policy, decided.balancing_threshold) == (policy, None)
    elsewhere = cluster.place("last", keys=SHARED[:10], excluded_instances=frozenset({"p2"}))
    assert sources(elsewhere) == [], "computed, although s2 could send it"


def test_a_session_stays_with_its_instance_and_others_do_not_move_it() -> None:
    cluster = of(4, "session-affinity")

    def homes(turn: str) -> dict[int, str]:
        return {s: ended(cluster, f"{turn}{s}", session_id=str(s)) for s in range(40)}

    before = homes("a")
    assert set(before.values()) == {"p0", "p1", "p2", "p3"}
    cluster.prefill("p4")
    after = homes("b")
    moved = {s for s in before if after[s] != before[s]}
    assert {after[s] for s in moved} == {"p4"}, "an instance that joins takes only what it wins"
    assert 0 < len(moved) < 20
    cluster.send(Deregister(instance_id=InstanceId("p4"), epoch=1))
    assert homes("c") == before


def test_a_session_leaves_an_overloaded_instance_and_comes_back() -> None:
    cluster = of(4, "session-affinity")
    home = ended(cluster, "r0", session_id="x")
    cluster.heartbeat(home, Load(num_waiting=1, queued_tokens=900))
    away = ended(cluster, "r1", session_id="x")
    assert away != home
    assert ended(cluster, "r2", session_id="x") == away, "to the same other one"
    cluster.heartbeat(home, Load(queued_tokens=0))
    assert ended(cluster, "r3", session_id="x") == home


def test_without_session_id_the_first_distinguishing_block_identifies_the_conversation() -> None:
    cluster = of(4, "session-affinity")
    system = SHARED[:3]
    # As instances do, the store reports blocks with their parents.
    chains = [system + chain(f"c{i}", 4) for i in range(MIN_FORK + 1)]
    pairs = tuple(pair for keys in chains for pair in zip(keys[1:], keys, strict=False))
    changes = BlockChanges(first_seq=1, next_seq=1 + len(pairs), added=pairs)
    cluster.send(Heartbeat(instance_id=InstanceId("s0"), epoch=1, load=Load(), changes=changes))
    homes = set()
    for i in range(20):
        first = system + chain(f"new{i}", 2)
        turns = [first, first + chain(f"more{i}", 2), first + chain(f"most{i}", 4)]
        chosen = {ended(cluster, f"r{i}-{n}", block_keys=keys, num_prompt_tokens=95) for n, keys in enumerate(turns)}
        assert len(chosen) == 1
        homes |= chosen
    assert len(homes) == 4, "what they have in common does not tie them"


# ---- `moonserve`

SLO_S = 30.0


def test_short_prompt_goes_before_a_long_waiting_one() -> None:
    made = of(1, "moonserve")
    made.place("running", tokens=300)  # 3 s
    assert made.place("long", tokens=1000).rank == NEAR(50.0)
    short = made.place("short", tokens=100)
    assert (short.rank, short.predicted_ttft_s) == (NEAR(5.0), NEAR(3.0 + 1.0)), "before the long one"
    decided = made.explain("short")
    (candidate,) = decided.prefill_candidates
    assert (decided.rank, candidate.queue_s, candidate.added_s) == (NEAR(5.0), NEAR(3.0), NEAR(1.0))
    made.now += 46.0
    assert made.place("later", tokens=100).predicted_ttft_s > 10.0, "the long one has waited enough"


def test_prompt_that_would_be_late_anyway_waits_behind_all_others() -> None:
    """Without admission, for an objective of 10 s and 6 s of queue: prompts of more than 4 s."""
    made = of(1, "moonserve", slo_s=10.0, admission=AdmissionMode.NONE)
    made.place("running", tokens=600)
    assert made.place("late", tokens=450).rank == NEAR(2 * (70.0 + 76.5))
    assert made.place("in time", tokens=350).predicted_ttft_s == NEAR(9.5), "before the late one"
    assert made.explain("late").prefill_candidates[0].queue_s == NEAR(10.0), "6 s, and what passes it"
    for name in ("running", "in time"):
        made.report(name, RequestPhase.FIRST_TOKEN)
    assert made.place("next", tokens=100).predicted_ttft_s == NEAR(5.5)
    # Only late prompts wait behind the running one, so the price is that of an idle instance.
    made.now += 4.4
    for number in range(3):
        made.place(f"late {number}", tokens=900)
    assert made.place("r", tokens=300).rank < 10.0


def test_admission_rejects_a_prompt_that_costs_more_than_it_gains() -> None:
    """For an objective of 10 s and 6 s of queue, over 10 · 0.4⁴ = 0.256 s of prefill, since it would delay others."""
    made = of(1, "moonserve", slo_s=10.0)
    made.place("running", tokens=600)
    rejected = made.reject("late", num_prompt_tokens=100)
    assert (rejected.predicted_ttft_s, rejected.reason) == (NEAR(11.0), "ttft_slo")
    assert made.place("worth it", tokens=25).predicted_ttft_s == NEAR(6.25)


def test_a_prompt_waits_for_those_of_the_same_instant() -> None:
    made = of(1, "moonserve", slo_s=100.0)
    assert [made.place(f"r{number}").predicted_ttft_s for number in range(4)] == NEAR([1.0, 2.0, 3.0, 4.0])


def test_only_the_best_instances_are_scored_exactly() -> None:
    waits = np.linspace(5.0, 1.0, 100)
    books = [SimpleNamespace(queue=PrefillQueue(RowRef.in_private_table(PrefillTable))) for _ in waits]
    for book, waiting_s in zip(books, waits.tolist(), strict=True):
        book.queue.add(RequestId("r"), waiting_s, 1, 0.0)
    made = offers([0] * 100, queue_s=waits, queue_waits=QueueWaits(books, 0.0))  # type: ignore[arg-type]
    weighed = LeastAddedDelay().weigh(Prompt(100, 10, 0, ttft_slo_s=SLO_S), made)
    assert (int(weighed.score.argmin()), np.isfinite(weighed.score).sum()) == (99, 16)
    assert np.isfinite(weighed.ttft_s).all(), "the record has a prediction for all"


# ---- all of them


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_draining_instance_is_not_chosen_and_leaving_one_loses_its_row(name: str) -> None:
    """Draining and excluded instances are never chosen, and the remaining rows stand for the right instances. Reports
    for a removed instance change no other row."""
    cluster = of(4, name)
    chosen = [cluster.place(f"r{i}").prefill.instance_id for i in range(8)]
    cluster.send(Deregister(instance_id=InstanceId("p1"), epoch=1))
    for i in range(len(chosen)):
        cluster.report(f"r{i}", RequestPhase.FINISHED)
    assert cluster.place("last").predicted_ttft_s == NEAR(1.0)
    cluster.heartbeat("p0", draining=True)
    without = frozenset({"p2"})
    assert {ended(cluster, f"q{i}", excluded_instances=without) for i in range(15)} == {"p3"}


# ---- users' own

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
from moonserve.conductor.placement.policies.base import predict_unfetched

@dataclass
class Mine:
    name: str = "mine"
    balancing_threshold: float | None = None
    by_session: bool = False

    def weigh(self, prompt, offers):
        return predict_unfetched(prompt, offers)

class Weighless:
    name = "weightless"
    by_session = False

class Broken:
    def __init__(self) -> None:
        raise RuntimeError("not today")
"""


def test_custom_policy_is_loaded_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "random.py"  # named like a module of the standard library, which must stay importable
    for name in ("mine", "changed"):
        path.write_text(SOURCE.replace('"mine"', f'"{name}"'))
        assert make_policy(f"{path}:Mine", 1.25).name == name
    import random

    assert random.Random(0).random() < 1
    policy = make_policy("moonserve.conductor.placement.policies.baselines:LeastLoaded", 1.25)
    assert isinstance(policy, LeastLoaded)


@pytest.mark.parametrize(
    ("name", "threshold", "reason"),
    [
        ("FILE:Nobody", 1.25, "AttributeError: module .* has no attribute 'Nobody'"),
        ("FILE:Broken", 1.25, "RuntimeError: not today"),
        ("FILE:Weighless", 1.25, "has no balancing_threshold, weigh; conductor/placement/policies/base.py"),
        *((name, 1.25, "cannot be created") for name in ("nowhere.py:A", "no.such:A", ":A", "a.py:")),
        ("nonsense", 2.0, "is not one of"),
        ("global-cache-aware", 0.5, "at least 1"),
        ("global-cache-aware", math.nan, "at least 1"),
    ],
)
def test_invalid_policies_are_config_errors(tmp_path: Path, name: str, threshold: float, reason: str) -> None:
    path = tmp_path / "policy.py"
    path.write_text(SOURCE)
    with pytest.raises(ConfigError, match=reason):
        make_policy(name.replace("FILE", str(path)), threshold)
