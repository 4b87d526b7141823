"""Algorithm 1 of the paper, cases worked by hand.

A block is 10 tokens, a computed token takes 10 ms, a fetched block 1 ms.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.decision import Decision
from conductor.events import Phase
from conductor.landing import least
from conductor.policies import make_policy
from conductor.policies.base import Offers, Prompt
from protocol.errors import ConfigError
from protocol.ids import RequestId
from protocol.request import Placement
from tests.conductor.cluster import Cluster, chain, pair
from tests.thoroughness import examples

SHARED = chain("a", 20)


def offers(*prefixes: int, device: int | None = None, queue_s: float = 0.0) -> Offers:
    """One instance for each prefix."""
    ones = np.ones(len(prefixes))
    own = np.array(prefixes)
    return Offers(
        identity=np.arange(len(prefixes), dtype=np.uint64),
        chosen_at=np.zeros(len(prefixes), np.int64),
        device_blocks=own if device is None else np.full_like(own, device),
        prefix_blocks=own,
        queue_s=ones * queue_s,
        local_s_per_block=ones * 0.0001,
        remote_s_per_block=ones * 0.001,
        c0=ones * 0.0,
        c1=ones * 0.01,
        c2=ones * 0.0,
        now=0.0,
        wait_s=lambda _row, _rank: queue_s,
    )


def decision(cluster: Cluster, request_id: str) -> Decision:
    found = cluster.state.explain(RequestId(request_id))
    assert found is not None
    return found


def sources(placement: Placement) -> list[tuple[str, int, int]]:
    return [(s.store.instance_id, s.first_block, s.num_blocks) for s in placement.prefix_sources]


@pytest.mark.parametrize(
    ("own", "best", "reuse"),
    [
        (0, 0, 0),  # nothing anywhere
        (0, 1, 1),  # prefix_len 0: infinitely larger
        (5, 10, 5),  # exactly the threshold is not above it
        (5, 11, 11),
        (10, 10, 10),
        (12, 10, 12),  # its own is the best
    ],
)
def test_a_prefix_is_fetched_above_the_threshold_only(own: int, best: int, reuse: int) -> None:
    policy = make_policy("global-cache-aware", 2.0)
    prompt = Prompt(num_tokens=200, block_size=10, best_blocks=best)
    weighed = policy.weigh(prompt, offers(own))
    assert weighed.reuse_blocks.tolist() == [reuse]
    assert weighed.transfer_s.tolist() == pytest.approx([(reuse - own) * 0.001])
    assert weighed.prefill_s.tolist() == pytest.approx([(200 - reuse * 10) * 0.01])


@given(
    instances=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 30), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    best=st.integers(0, 20),
    threshold=st.sampled_from([1.0, 1.25, 2.0]),
)
@settings(max_examples=examples(150), deadline=None)
def test_columns_decide_as_the_loop_of_the_paper(
    instances: list[tuple[int, int, int, int]], best: int, threshold: float
) -> None:
    """Algorithm 1 line by line; of equal ones the least recently chosen, then the first."""
    device = np.array([min(a, b) for a, b, _, _ in instances])
    prefix = np.array([max(a, b) for a, b, _, _ in instances])
    queue = np.array([q / 10 for _, _, q, _ in instances])
    chosen_at = np.array([c for *_, c in instances])
    given_offers = offers(*prefix.tolist())._replace(
        device_blocks=device, queue_s=queue, chosen_at=chosen_at
    )
    prompt = Prompt(num_tokens=250, block_size=10, best_blocks=best)
    weighed = make_policy("global-cache-aware", threshold).weigh(prompt, given_offers)
    expected = []
    for i, (own, queue_s) in enumerate(zip(prefix.tolist(), queue.tolist(), strict=True)):
        if (best / own if own else (math.inf if best else 0.0)) > threshold:
            reuse, transfer_s = best, (best - own) * 0.001
        else:
            reuse, transfer_s = own, 0.0
        ttft_s = transfer_s + queue_s + (250 - reuse * 10) * 0.01
        ttft_s += (own - int(device[i])) * 0.0001  # from the home store into the device
        assert weighed.ttft_s[i] == pytest.approx(ttft_s)
        expected.append((float(weighed.ttft_s[i]), int(chosen_at[i]), i))
    assert least(weighed.score, chosen_at) == min(expected)[2]


def test_ttft_is_loading_and_transfer_and_queue_and_prefill() -> None:
    policy = make_policy("global-cache-aware", 2.0)
    prompt = Prompt(num_tokens=200, block_size=10, best_blocks=10)
    weighed = policy.weigh(prompt, offers(4, device=1, queue_s=3.0))
    assert weighed.load_s.tolist() == pytest.approx([3 * 0.0001])
    assert weighed.transfer_s.tolist() == pytest.approx([6 * 0.001])
    assert weighed.ttft_s.tolist() == pytest.approx([0.0003 + 0.006 + 3.0 + 1.0])


def test_a_threshold_below_one_and_an_unknown_policy_are_config_errors() -> None:
    for name, threshold in (("global-cache-aware", 0.5), ("nonsense", 2.0)):
        with pytest.raises(ConfigError):
            make_policy(name, threshold)
    with pytest.raises(ConfigError):
        make_policy("global-cache-aware", float("nan"))


def test_the_instance_that_holds_the_prefix_wins_while_it_is_idle() -> None:
    cluster = Cluster()
    for name in ("p0", "p1", "p2"):
        cluster.prefill(name)
    cluster.decode("d0")
    cluster.heartbeat("p1", holds=SHARED[:9])
    placement = cluster.place("r0", keys=SHARED[:10], tokens=100)
    assert placement.prefill.instance_id == "p1"
    assert placement.prefix_sources == (), "its own device cache needs no source"
    assert placement.predicted_ttft_s == pytest.approx(0.1)


def test_a_device_cache_cannot_be_read_by_others() -> None:
    cluster = Cluster()
    cluster.prefill("p0")
    cluster.prefill("p1")
    cluster.decode("d0")
    cluster.heartbeat("p1", holds=SHARED[:9])
    placement = cluster.place("r0", keys=SHARED[:10], tokens=100, excluded=frozenset({"p1"}))
    assert placement.prefix_sources == ()
    assert placement.predicted_ttft_s == pytest.approx(1.0)


def test_the_last_token_is_always_computed() -> None:
    cluster = pair()
    cluster.heartbeat("p0", holds=SHARED[:10])
    assert cluster.place("r0", keys=SHARED[:10], tokens=100).predicted_ttft_s == pytest.approx(0.1)
    cluster.report("r0", Phase.FINISHED)
    assert cluster.place("r1", keys=SHARED[:10], tokens=101).predicted_ttft_s == pytest.approx(0.01)


def test_the_home_store_continues_the_device_cache() -> None:
    cluster = Cluster()
    cluster.store("s0", host="h0")
    cluster.prefill("p0", host="h0", home="s0")
    cluster.decode("d0")
    cluster.heartbeat("p0", holds=SHARED[:4])
    cluster.heartbeat("s0", holds=SHARED[4:8])  # without the leading ones
    placement = cluster.place("r0", keys=SHARED[:10], tokens=100)
    assert sources(placement) == [("s0", 4, 4)]
    (candidate,) = decision(cluster, "r0").prefill_candidates
    assert (candidate.device_blocks, candidate.prefix_blocks) == (4, 8)
    assert candidate.load_s > 0
    assert candidate.transfer_s == 0


def test_a_remote_store_serves_what_home_lacks_and_home_comes_first() -> None:
    cluster = Cluster()
    cluster.store("s0", host="h0")
    cluster.store("s1", host="h1")
    cluster.prefill("p0", host="h0", home="s0")
    cluster.decode("d0")
    cluster.heartbeat("p0", holds=SHARED[:1])
    cluster.heartbeat("s0", holds=SHARED[:3])
    cluster.heartbeat("s1", holds=SHARED[:9])
    placement = cluster.place("r0", keys=SHARED[:10], tokens=100)
    assert sources(placement) == [("s0", 1, 2), ("s1", 3, 6)]
    assert placement.predicted_ttft_s == pytest.approx(2 * 1e6 / 5e9 + 6 * 0.001 + 0.1)


def test_reads_spread_over_the_holders_and_are_freed_by_the_first_token() -> None:
    cluster = Cluster()
    for name in ("s0", "s1"):
        cluster.store(name)
        cluster.heartbeat(name, holds=SHARED[:9])
    cluster.prefill("p0")
    cluster.decode("d0")
    first = cluster.place("r0", keys=SHARED[:10], tokens=100)
    second = cluster.place("r1", keys=SHARED[:10], tokens=100)
    assert sources(first) == [("s0", 0, 9)]
    assert sources(second) == [("s1", 0, 9)]
    cluster.report("r0", Phase.FIRST_TOKEN)
    assert sources(cluster.place("r2", keys=SHARED[:10], tokens=100)) == [("s0", 0, 9)]


def test_a_shared_first_block_does_not_send_everything_to_one_node() -> None:
    cluster = Cluster()
    for name in ("p0", "p1", "p2", "p3"):
        cluster.prefill(name)
    cluster.decode("d0")
    cluster.heartbeat("p0", holds=SHARED[:1])
    chosen = [
        cluster.place(f"r{i}", keys=(*SHARED[:1], *chain(f"u{i}", 9)), tokens=100)
        for i in range(40)
    ]
    counts = [sum(p.prefill.instance_id == f"p{i}" for p in chosen) for i in range(4)]
    assert chosen[0].prefill.instance_id == "p0"
    assert min(counts) >= 9, counts


def test_a_hot_prefix_is_copied_once_the_queue_at_its_holder_builds_up() -> None:
    cluster = Cluster()
    for i in range(2):
        cluster.store(f"s{i}", host=f"h{i}")
        cluster.prefill(f"p{i}", host=f"h{i}", home=f"s{i}")
    cluster.decode("d0")
    cluster.heartbeat("p0", holds=SHARED[:9])
    cluster.heartbeat("s0", holds=SHARED[:9])
    first = cluster.place("r0", keys=SHARED[:10], tokens=100)
    second = cluster.place("r1", keys=SHARED[:10], tokens=100)
    assert first.prefill.instance_id == "p0"
    assert second.prefill.instance_id == "p1", "0.009 s of transfer beats 0.1 s of queue"
    assert sources(second) == [("s0", 0, 9)]


def test_equal_candidates_take_turns() -> None:
    cluster = Cluster(policy="least-loaded")
    for name in ("p0", "p1", "p2"):
        cluster.prefill(name)
    cluster.decode("d0")
    turns = []
    for i in range(6):
        turns.append(cluster.place(f"r{i}").prefill.instance_id)
        cluster.report(f"r{i}", Phase.CANCELLED)
    assert turns == ["p0", "p1", "p2"] * 2


def test_least_loaded_ignores_prefixes() -> None:
    cluster = Cluster(policy="least-loaded")
    cluster.prefill("p0")
    cluster.prefill("p1")
    cluster.decode("d0")
    cluster.heartbeat("p1", holds=SHARED[:9])
    cluster.place("r0", keys=SHARED[:10], tokens=100, excluded=frozenset({"p0"}))
    assert cluster.place("r1", keys=SHARED[:10], tokens=100).prefill.instance_id == "p0"


def test_excluded_stores_are_not_read_from() -> None:
    cluster = pair()
    cluster.store("s0")
    cluster.heartbeat("s0", holds=SHARED[:9])
    placement = cluster.place("r0", keys=SHARED[:10], tokens=100, excluded=frozenset({"s0"}))
    assert placement.prefix_sources == ()
    cluster.state.validate()
