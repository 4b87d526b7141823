"""Tenants with keys of their own through real processes: nothing that one leaves behind, in any tier, is found by
another, and where one floods the prompts of another go first.

What a tier says is held against the very keys that each tenant's blocks must have. That times do not tell either is
`benchmarks.isolation`: here it is what they would tell of that is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "flood": "key-of-flood==", "quiet": "key-q"}
NUM_FLOOD = 16
MOST_FLOODS = 8  # each as large again as the one before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small steps, and slow ones, so that a flood takes many of them and is not computed as fast as it comes."""
    named = ",".join(f"{tenant}={key}" for tenant, key in KEYS.items())
    flags = (
        *("--api-key", OPERATOR, "--tenant-keys", named, "--tenant-weights", "quiet=2"),
        *("--block-size", str(BLOCK_SIZE), "--store-reads", "always", "--dtype", "float32"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--kernels", "torch"),
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
        hits = cluster.metric("vllm:prefix_cache_hits_total")
        counted = cluster.counter("prefill-0", "store_hit_blocks")
        first = ask(cluster, key, PROMPT, max_tokens=2, **body)
        assert cached_of(first) == 0
        assert set(found_anywhere(decision_about(cluster, first)).values()) == {0}
        assert cluster.metric("vllm:prefix_cache_hits_total") == hits
        assert cluster.counter("prefill-0", "store_hit_blocks") == counted

        blocks = nth * NUM_BLOCKS
        cluster.wait_for("the store", lambda n=blocks: cluster.store().num_objects >= n)
        cluster.wait_for("the index", lambda n=blocks: cluster.num_indexed() >= n)
        assert cluster.store().num_objects == blocks  # none of another's stood for one
        again = ask(cluster, key, PROMPT, max_tokens=2, **body)
        assert cached_of(again) == NUM_BLOCKS * BLOCK_SIZE
        assert found_anywhere(decision_about(cluster, again))["best_blocks"] == NUM_BLOCKS
        assert cluster.metric("vllm:prefix_cache_hits_total") == hits + NUM_BLOCKS * BLOCK_SIZE
    assert len(cluster.places(sorted(seen))) == len(askers) * NUM_BLOCKS
    cluster.wait_until_all_is_free()


def test_a_tenant_is_not_told_what_another_asked(cluster: Cluster) -> None:
    """By an id that it could guess."""
    with cluster.client() as client:
        body = {"prompt": [1], "max_tokens": 1}
        headers = {"authorization": f"Bearer {KEYS['alice']}", "x-request-id": "order-17"}
        client.post("/v1/completions", json=body, headers=headers)
        for key, status in ((KEYS["alice"], 200), (KEYS["bob"], 404), (OPERATOR, 200)):
            headers = {"authorization": f"Bearer {key}"}
            reply = client.get("/v1/requests/order-17/explain", headers=headers)
            assert reply.status_code == status, reply.text


def flood_and_ask(
    cluster: Cluster, pool: ThreadPoolExecutor, size: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Decisions about a flood, and about a prompt of the quiet tenant once the first of the flood has its token."""

    def one(tenant: str, number: int) -> dict[str, Any]:
        prompt = prompt_of(f"{tenant} {size} {number}", 200)
        return ask(cluster, KEYS[tenant], prompt, user="somebody else")

    flood = [pool.submit(one, "flood", number) for number in range(size)]
    flood[0].result()
    asked = one("quiet", 0)
    told = [decision_about(cluster, each.result()) for each in flood]
    return told, decision_about(cluster, asked)


def test_a_quiet_tenants_prompt_goes_before_a_flood_that_was_there_first(cluster: Cluster) -> None:
    """Floods grow until one is still there when the quiet tenant asks. The key says who asks, not the body."""
    with ThreadPoolExecutor(NUM_FLOOD << MOST_FLOODS) as pool:
        for doubled in range(MOST_FLOODS):
            flood, quiet = flood_and_ask(cluster, pool, NUM_FLOOD << doubled)
            assert {each["turn"]["tenant"] for each in flood} == {"flood"}
            assert quiet["turn"]["tenant"] == "quiet"
            assert quiet["turn"]["weight"] == 2.0
            if quiet["rank"] < 0.0:
                break
    assert quiet["rank"] < 0.0, "before prompts that were there"
    assert all(each["rank"] >= 0.0 for each in flood), "none of the flood before who was there"
    longest_s = max(each["prefill_candidates"][0]["queue_s"] for each in flood)
    assert quiet["prefill_candidates"][0]["queue_s"] < longest_s
