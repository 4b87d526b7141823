"""What workers of a real cluster tell of themselves in heartbeats, as the conductor shows it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from protocol.pb import conductor_pb2, conductor_pb2_grpc
from protocol.rpc import TOKEN_HEADER
from tests.e2e.cluster import UNHURRIED, Cluster, running_cluster
from tests.patience import PATIENCE_S
from tests.random_models import make_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("heartbeats")
    make_model("llama", folder / "model", max_position_embeddings=4096)
    with running_cluster(folder / "model", folder / "logs", *UNHURRIED) as cluster:
        yield cluster


def loads(cluster: Cluster) -> dict[str, conductor_pb2.Load]:
    """By instance, as last told."""
    log = (cluster.log_dir / "conductor.log").read_text()
    address = re.findall(r"ready rpc=(\S+)", log)[-1]
    with grpc.insecure_channel(address) as channel:
        view = conductor_pb2_grpc.ConductorStub(channel).GetCluster(
            conductor_pb2.GetClusterRequest(),
            metadata=((TOKEN_HEADER, cluster.token),),
            timeout=PATIENCE_S,
        )
    return {each.endpoint.instance_id: each.load for each in view.instances}


def test_bandwidths_and_steps_that_workers_saw_reach_the_conductor(cluster: Cluster) -> None:
    prompt = random.Random(1).choices(range(256), k=3_000)
    cluster.complete(prompt, max_tokens=50, ignore_eos=True)

    def written() -> dict[str, float]:
        found = loads(cluster)["prefill-0"].traffic
        return {t.peer: t.written_bytes / t.written_s for t in found if t.written_s}

    cluster.wait_for(
        "what the prefill worker wrote", lambda: {"decode-0", "store-0"} <= written().keys()
    )
    assert all(1e5 < rate < 1e12 for rate in written().values())
    cluster.wait_for(
        "the decode worker's steps", lambda: loads(cluster)["decode-0"].steps.num_steps >= 49
    )
    steps = loads(cluster)["decode-0"].steps
    assert 0 < steps.seconds / steps.num_steps < PATIENCE_S
    assert steps.sequences >= steps.num_steps
    assert steps.context_tokens >= steps.num_steps * len(prompt)

    def shown() -> dict[str, dict[str, Any]]:
        return {i["instance_id"]: i["load"] for i in cluster.instances()}

    cluster.wait_for("the gateway's page", lambda: shown()["decode-0"]["steps"]["num_steps"] >= 49)
    # It shows what each worker's latest heartbeat said, a beat behind what the worker itself says.
    cluster.wait_for(
        "both peers on it",
        lambda: {t["peer"] for t in shown()["prefill-0"]["traffic"]} >= {"decode-0", "store-0"},
    )
    store = loads(cluster)["store-0"]
    assert 0 < store.free_bytes < store.capacity_bytes
