"""Two tenants ask the same: nothing that either leaves behind, in any tier, is found by the other.

What a tier says is held against the very keys that each tenant's blocks must have. That times do not tell either is
`benchmarks.isolation`: here it is what they would tell of that is counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.wishes.isolation import salt_of
from protocol.keys import BlockKey, block_keys, root_key
from tests.e2e.accounts import accounts_of
from tests.e2e.cluster import UNHURRIED, Cluster, metric, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

BLOCK_SIZE = 16
NUM_BLOCKS = 5
PROMPT = random.Random(0).choices(range(256), k=NUM_BLOCKS * BLOCK_SIZE + 3)
OPERATOR, ALICE, BOB = ("key-of-nobody", "key-of-alice", "key-of-bob")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("isolation")
    make_model("llama", folder / "model")
    flags = (
        *("--block-size", str(BLOCK_SIZE), "--api-key", OPERATOR),
        *("--tenant-keys", f"alice={ALICE},bob={BOB}"),
    )
    with running_cluster(folder / "model", folder / "logs", *flags, *UNHURRIED) as started:
        started.headers = {"authorization": f"Bearer {OPERATOR}"}
        yield started


def ask(cluster: Cluster, key: str, **body: Any) -> dict[str, Any]:
    """The answer, once its blocks are in the store and known to the conductor."""
    with cluster.client() as client:
        reply = client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **body},
            headers={"authorization": f"Bearer {key}"},
        )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def keys_of(cluster: Cluster, tenant: str, cache_salt: str | None = None) -> list[BlockKey]:
    with cluster.client() as client:
        fingerprint = client.get("/v1/cluster").json()["fingerprint"]
    return block_keys(root_key(fingerprint, salt_of(tenant, cache_salt)), PROMPT, BLOCK_SIZE)


def indexed(cluster: Cluster) -> int:
    return sum(each["indexed_blocks"] for each in cluster.instances() if each["role"] == "store")


def found_anywhere(decision: dict[str, Any]) -> dict[str, int]:
    """Blocks of the prompt that any table of the conductor had."""
    candidates = decision["prefill_candidates"]
    named = ("device_blocks", "prefix_blocks", "reuse_blocks")
    most = {name: max(each[name] for each in candidates) for name in named}
    return {**most, "best_blocks": decision["best_blocks"], "sources": len(decision["sources"])}


def explained(cluster: Cluster, answer: dict[str, Any]) -> dict[str, Any]:
    with cluster.client() as client:
        reply = client.get(f"/v1/requests/{answer['id']}/explain")
    decision: dict[str, Any] = reply.json()["decisions"][0]
    return decision


def test_no_tier_index_or_metric_shares_a_block_between_tenants_or_salts(cluster: Cluster) -> None:
    """Each of four asks twice: a miss whoever asked before, then a hit on what is its own."""
    askers = [("alice", ALICE, {}), ("bob", BOB, {})]
    askers += [("bob", BOB, {"cache_salt": "s"}), ("", OPERATOR, {"cache_salt": "s"})]
    seen: set[BlockKey] = set()
    with accounts_of(cluster) as accounts:
        for nth, (tenant, key, body) in enumerate(askers, 1):
            own = keys_of(cluster, tenant, body.get("cache_salt"))
            assert not seen & set(own)
            seen |= set(own)
            hits_before = hits(cluster)
            counted = accounts.counter("prefill-0", "store_hit_blocks")
            first = ask(cluster, key, **body)
            assert cached(first) == 0
            assert set(found_anywhere(explained(cluster, first)).values()) == {0}
            assert hits(cluster) == hits_before
            assert accounts.counter("prefill-0", "store_hit_blocks") == counted

            blocks = nth * NUM_BLOCKS
            cluster.wait_for("the store", lambda n=blocks: accounts.store().num_objects >= n)
            cluster.wait_for("the index", lambda n=blocks: indexed(cluster) >= n)
            assert accounts.store().num_objects == blocks  # none of another's stood for one
            again = ask(cluster, key, **body)
            assert cached(again) == NUM_BLOCKS * BLOCK_SIZE
            assert found_anywhere(explained(cluster, again))["best_blocks"] == NUM_BLOCKS
            assert hits(cluster) == hits_before + NUM_BLOCKS * BLOCK_SIZE
        assert len(accounts.places(sorted(seen))) == len(askers) * NUM_BLOCKS
        accounts.wait_until_all_is_free()


def hits(cluster: Cluster) -> float:
    """Tokens that the gateway counts as cached."""
    with cluster.client() as client:
        return metric(client.get("/metrics").text, "vllm:prefix_cache_hits_total")


def test_a_tenant_is_not_told_what_another_asked(cluster: Cluster) -> None:
    """By an id that it could guess."""
    with cluster.client() as client:
        for key, status in ((ALICE, 200), (BOB, 404), (OPERATOR, 200)):
            if key == ALICE:
                headers = {"authorization": f"Bearer {ALICE}", "x-request-id": "order-17"}
                client.post(
                    "/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers=headers
                )
            reply = client.get(
                "/v1/requests/order-17/explain", headers={"authorization": f"Bearer {key}"}
            )
            assert reply.status_code == status, reply.text
