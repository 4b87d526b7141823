"""Two tenants with keys of their own through real processes: one floods, and the other one's prompts go before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

FLOOD, QUIET = "key-of-flood==", "key-of-quiet"
NUM_FLOOD = 16
MOST_FLOODS = 8  # each as large again as the one before


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small steps, and slow ones, so that a flood takes many of them and is not computed as fast as it comes."""
    folder: Path = tmp_path_factory.mktemp("fairness")
    make_model("llama", folder / "model")
    flags = (
        *("--tenant-keys", f"flood={FLOOD},quiet={QUIET}", "--tenant-weights", "quiet=2"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--kernels", "torch"),
    )
    with running_cluster(folder / "model", folder / "logs", *flags) as started:
        yield started


def complete(cluster: Cluster, key: str, number: int) -> dict[str, Any]:
    """One token after a prompt that no other request has."""
    prompt = random.Random(number).choices(range(1, 91), k=200)
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "user": "somebody else"}
    with cluster.client() as client:
        reply = client.post(
            "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
        )
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def decision(cluster: Cluster, key: str, answer: dict[str, Any]) -> dict[str, Any]:
    """As whose request it was sees it."""
    with cluster.client() as client:
        reply = client.get(
            f"/v1/requests/{answer['id']}/explain", headers={"authorization": f"Bearer {key}"}
        )
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["decisions"][0]
    return found


def flood_and_ask(
    cluster: Cluster, pool: ThreadPoolExecutor, first: int, size: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Decisions about a flood, and about a prompt of the quiet tenant once the first of the flood has its token."""
    flood: list[Future[dict[str, Any]]] = [
        pool.submit(complete, cluster, FLOOD, first + number) for number in range(size)
    ]
    flood[0].result()
    asked = complete(cluster, QUIET, first + size)
    return [decision(cluster, FLOOD, each.result()) for each in flood], decision(
        cluster, QUIET, asked
    )


def test_a_quiet_tenants_prompt_goes_before_a_flood_that_was_there_first(cluster: Cluster) -> None:
    """Floods grow until one is still there when the quiet tenant asks. The key says who asks, not the body."""
    first, size = 1, NUM_FLOOD
    with ThreadPoolExecutor(NUM_FLOOD << MOST_FLOODS) as pool:
        for _ in range(MOST_FLOODS):
            flood, quiet = flood_and_ask(cluster, pool, first, size)
            assert {each["turn"]["tenant"] for each in flood} == {"flood"}
            assert quiet["turn"]["tenant"] == "quiet"
            assert quiet["turn"]["weight"] == 2.0
            if quiet["rank"] < 0.0:
                break
            first, size = first + size + 1, 2 * size
    assert quiet["rank"] < 0.0, "before prompts that were there"
    assert all(each["rank"] >= 0.0 for each in flood), "none of the flood before who was there"
    longest_s = max(each["prefill_candidates"][0]["queue_s"] for each in flood)
    assert quiet["prefill_candidates"][0]["queue_s"] < longest_s


def test_a_key_of_nobody_is_refused(cluster: Cluster) -> None:
    with cluster.client() as client:
        for headers in ({}, {"authorization": "Bearer flood"}):
            reply = client.post("/v1/completions", json={"prompt": [1]}, headers=headers)
            assert reply.status_code == 401
            assert FLOOD not in reply.text
