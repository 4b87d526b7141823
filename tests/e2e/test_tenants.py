"""Tenants with keys of their own through real processes: nothing that one leaves behind, in any tier, is found by
another.

What a tier says is held against the very keys that each tenant's blocks must have. That times do not tell either is
`benchmarks.isolation`: here it is what they would tell of that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.access.isolation import salt_of
from protocol.keys import BlockKey
from tests.e2e.cluster import Cluster, cached_of, prompt_of, small_cluster

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
NUM_BLOCKS = 5
PROMPT = prompt_of("isolation", NUM_BLOCKS * BLOCK_SIZE + 3)
OPERATOR = "key-of-nobody"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob=="}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    named = ",".join(f"{tenant}={key}" for tenant, key in KEYS.items())
    flags = (
        *("--api-key", OPERATOR, "--tenant-keys", named, "--tenant-weights", "bob=2"),
        *("--block-size", str(BLOCK_SIZE), "--store-reads", "always", "--dtype", "float32"),
    )
    with small_cluster(tmp_path_factory.mktemp("tenants"), *flags) as started:
        started.headers = {"authorization": f"Bearer {OPERATOR}"}
        yield started


def ask(cluster: Cluster, key: str, prompt: list[int], **body: Any) -> dict[str, Any]:
    with cluster.client() as client:
        reply = client.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 1, "temperature": 0, **body},
            headers={"authorization": f"Bearer {key}"},
        )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def decision_about(cluster: Cluster, answer: dict[str, Any]) -> dict[str, Any]:
    return cluster.decisions(answer["id"])[0]


def hits_of(cluster: Cluster) -> float:
    return cluster.metric("vllm:prefix_cache_hits_total")


def found_anywhere(decision: dict[str, Any]) -> dict[str, int]:
    """Blocks of the prompt that any table of the conductor had."""
    candidates = decision["prefill_candidates"]
    named = ("device_blocks", "prefix_blocks", "reuse_blocks")
    most = {name: max(each[name] for each in candidates) for name in named}
    return {**most, "best_blocks": decision["best_blocks"], "sources": len(decision["sources"])}


def test_no_tier_index_or_metric_shares_a_block_between_tenants_or_salts(cluster: Cluster) -> None:
    """Each of four asks twice: a miss whoever asked before, then a hit on what is its own."""
    askers: list[tuple[str, dict[str, str]]] = [("alice", {}), ("bob", {})]
    askers += [("bob", {"cache_salt": "s"}), ("", {"cache_salt": "s"})]
    seen: set[BlockKey] = set()
    for nth, (tenant, body) in enumerate(askers, 1):
        key = KEYS.get(tenant, OPERATOR)
        own = cluster.keys_of(PROMPT, BLOCK_SIZE, salt_of(tenant, body.get("cache_salt")))
        assert not seen & set(own)
        seen |= set(own)
        hits = hits_of(cluster)
        counted = cluster.counter("prefill-0", "store_hit_blocks")
        first = ask(cluster, key, PROMPT, max_tokens=2, **body)
        assert cached_of(first) == 0
        decision = decision_about(cluster, first)
        assert set(found_anywhere(decision).values()) == {0}
        # The key says who asks.
        assert decision["turn"]["tenant"] == tenant
        assert decision["turn"]["weight"] == (2.0 if tenant == "bob" else 1.0)
        assert hits_of(cluster) == hits
        assert cluster.counter("prefill-0", "store_hit_blocks") == counted

        blocks = nth * NUM_BLOCKS
        cluster.wait_for("the store", lambda n=blocks: cluster.store().num_objects >= n)
        cluster.wait_for("the index", lambda n=blocks: cluster.num_indexed() >= n)
        assert cluster.store().num_objects == blocks  # none of another's stood for one
        again = ask(cluster, key, PROMPT, max_tokens=2, **body)
        assert cached_of(again) == NUM_BLOCKS * BLOCK_SIZE
        assert found_anywhere(decision_about(cluster, again))["best_blocks"] == NUM_BLOCKS
        own_hits = hits + NUM_BLOCKS * BLOCK_SIZE
        cluster.wait_for("its count", lambda n=own_hits: hits_of(cluster) == n)
    assert len(cluster.places(sorted(seen))) == len(askers) * NUM_BLOCKS
    cluster.wait_until_all_is_free()
