"""The policy moonserve through real processes: its ranks reach the workers, and answers are the same as without it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("order")
    make_model("llama", folder / "model")
    flags = ("--placement-policy", "moonserve", "--prefill-workers", "2")
    with running_cluster(folder / "model", folder / "logs", *flags) as started:
        yield started


def decision(cluster: Cluster, request_id: str) -> dict[str, Any]:
    with cluster.client() as client:
        reply = client.get(f"/v1/requests/{request_id}/explain")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["decisions"][0]
    return found


def test_requests_that_yield_to_each_other_all_get_the_tokens_that_they_get_alone(
    cluster: Cluster,
) -> None:
    """Long and short prompts at once, many more than workers."""
    prompts = [
        [(7 * number + i) % 90 + 1 for i in range((200, 12)[number % 2])] for number in range(12)
    ]

    def complete(prompt: list[int]) -> dict[str, Any]:
        answer: dict[str, Any] = cluster.complete(
            prompt, max_tokens=4, ignore_eos=True, temperature=0.0, return_token_ids=True
        )
        return answer

    alone = [complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(complete, prompts))
    tokens = [[each["choices"][0]["token_ids"] for each in run] for run in (alone, together)]
    assert tokens[0] == tokens[1]
    assert all(len(each) == 4 for each in tokens[0])
    decisions = [decision(cluster, each["id"]) for each in alone[:2]]
    assert [each["policy"] for each in decisions] == ["moonserve", "moonserve"]
    long, short = (each["rank"] for each in decisions)
    assert long >= short > 0.0, "a prompt yields by its own prefill time"
