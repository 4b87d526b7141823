"""A worker that is stopped (SIGSTOP) says nothing and closes nothing: it is removed for its silence, its requests go on
elsewhere, and when it wakes it is a member again and nothing it had is counted twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.random_models import make_model

pytestmark = pytest.mark.e2e

WISH = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two of each role, so that there is somebody else."""
    folder = tmp_path_factory.mktemp("silent")
    make_model("llama", folder / "model", max_position_embeddings=16_384)
    both = ("--prefill-workers", "2", "--decode-workers", "2", "--kv-cache-memory", "32MiB")
    steps = ("--max-num-batched-tokens", "64", "--transfer-timeout-s", "5")
    with running_cluster(folder / "model", folder / "logs", *UNHURRIED, *both, *steps) as cluster:
        yield cluster


def is_member(cluster: Cluster, instance_id: str) -> bool:
    return instance_id in {each["instance_id"] for each in cluster.instances()}


def at_work(cluster: Cluster, role: str) -> str | None:
    """A worker of this role that has something to do, by what the workers say now."""
    for each in cluster.instances():
        if each["role"] == role:
            load = cluster.status(each["instance_id"]).load
            if load.queued_tokens > 500 or (role == "decode" and load.num_running):
                name: str = each["instance_id"]
                return name
    return None


@pytest.mark.parametrize(
    ("role", "tokens", "answer"), [("prefill", 12_000, 5), ("decode", 40, 600)]
)
def test_a_silent_worker_is_removed_and_its_request_goes_on_elsewhere(
    cluster: Cluster, role: str, tokens: int, answer: int
) -> None:
    prompt = random.Random(role).choices(range(256), k=tokens)
    wish: dict[str, Any] = {"max_tokens": answer, **WISH}
    undisturbed = cluster.complete(prompt, cache_salt="undisturbed", **wish)
    found: list[str] = []

    def is_caught() -> bool:
        name = at_work(cluster, role)
        found.extend([name] if name else [])
        return bool(found) or asked.done()

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.complete, prompt, **wish)
        cluster.wait_for("the request at work", is_caught)
        silent = (found or [f"{role}-0"])[0]
        with cluster.stopped(silent):
            cluster.wait_for("its removal", lambda: not is_member(cluster, silent))
            disturbed = asked.result()
            other = cluster.complete([1, 2, 3], max_tokens=2, **WISH)
    assert disturbed["choices"][0]["token_ids"] == undisturbed["choices"][0]["token_ids"]
    assert len(other["choices"][0]["token_ids"]) == 2
    log = (cluster.log_dir / "conductor.log").read_text()
    assert f"{role} {silent} removed: silent" in log
    cluster.wait_for("it back", lambda: is_member(cluster, silent))
