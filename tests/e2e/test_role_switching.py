"""Workers, as real processes, that change between prefill and decode while requests are in flight."""

import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from moonserve.deploy.admin import drain_and_role
from tests.background import Background
from tests.commands import Command
from tests.e2e.cluster import GREEDY, Cluster, running_cluster
from tests.e2e.load import Regulars

PROMPT = [3 + i % 90 for i in range(100)]
LONG = 150  # tokens
FLAGS = ("--role-switching", "on", "--decode-workers", "2", "--num-threads", "1")


@pytest.fixture(scope="module")
def cluster(cluster: Cluster) -> Cluster:
    """Waits for the second decode worker: readiness needs one per role, and the last one of a role cannot change."""
    cluster.wait_for("both decode workers", lambda: roles(cluster)["decode"] == 2)
    return cluster


def switch(cluster: Cluster, instance_id: str, to: str, drain_s: float) -> int:
    arguments = [instance_id, to, "--url", cluster.url, "--drain-s", str(drain_s)]
    return drain_and_role.role(arguments, {"MOONSERVE_CLUSTER_TOKEN": cluster.token})


@pytest.mark.parametrize(
    "drain_s", [pytest.param(0.0, id="cut off at once"), pytest.param(300.0, id="ends where it is")]
)
def test_no_answer_is_lost_or_wrong_while_workers_of_both_roles_change_under_load(
    cluster: Cluster, drain_s: float
) -> None:
    """Clients receive short answers without a pause and a long stream that moves between workers."""
    prompts = [PROMPT[:20] + [number] * 60 for number in range(10, 16)]
    moves = (("worker-1", "prefill"), ("worker-0", "decode"), ("worker-0", "prefill"), ("worker-1", "decode"))
    with Regulars(cluster, prompts, 20, num_streamed=LONG):
        for instance_id, to in moves:
            assert switch(cluster, instance_id, to, drain_s) == 0


def test_the_prefix_cache_survives_a_change_of_role(cluster: Cluster) -> None:
    cluster.greedy(PROMPT, 2)
    num_blocks = len(PROMPT) // 32
    # One of the two decode workers has it and becomes a prefill worker, the only one that has it.
    cluster.wait_for("a holder", lambda: holders(cluster, num_blocks))
    holder = holders(cluster, num_blocks)[0]
    held = cluster.instance(holder)["indexed_blocks"]
    assert switch(cluster, holder, "prefill", 300.0) == 0
    cluster.wait_for("its blocks in the index", lambda: cluster.instance(holder)["indexed_blocks"] >= held)
    answer = cluster.greedy(PROMPT, 2)
    (decision,) = cluster.decisions(answer["id"])
    (found,) = (c for c in decision["prefill_candidates"] if c["instance_id"] == holder)
    assert found["device_blocks"] >= num_blocks
    assert switch(cluster, holder, "decode", 300.0) == 0


def holders(cluster: Cluster, num_blocks: int) -> list[str]:
    """Returns the decode workers that have at least `num_blocks` blocks according to the conductor."""
    return [
        i["instance_id"] for i in cluster.instances() if i["role"] == "decode" and i["indexed_blocks"] >= num_blocks
    ]


def test_the_role_command_reports_errors(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"MOONSERVE_CLUSTER_TOKEN": cluster.token}
    role = partial(Command(capsys, drain_and_role.role, environ=environ), "--url", cluster.url, "--drain-s", "0.0")
    assert "worker-9" in role("worker-9", "decode", ends=1).err
    assert "is a prefill worker" in role("worker-0", "prefill", ends=0).out
    assert "the only prefill worker" in role("worker-0", "decode", ends=2).err
    wrong = {"MOONSERVE_CLUSTER_TOKEN": "wrong"}
    assert "MOONSERVE_CLUSTER_TOKEN" in role("worker-0", "decode", "--force", ends=2, environ=wrong).err


def test_the_conductor_turns_a_decode_worker_into_a_prefill_worker_where_prompts_queue(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A flood of prompts lasts until the role changes. The prompts are long enough that their computation takes most of
    the time."""
    flags = (*FLAGS, "--ttft-slo", "0.02", "--role-hold-s", "0", "--no-enable-prefix-caching")
    with running_cluster(cluster.model, tmp_path, *flags) as cluster:
        with Background([partial(flood, cluster, over := threading.Event())] * 24):
            try:
                cluster.wait_for("a change", lambda: roles(cluster)["prefill"] == 2)
            finally:
                over.set()
        assert roles(cluster) == {"prefill": 2, "decode": 1}
        assert not cluster.tracebacks(), cluster.logs()


def flood(cluster: Cluster, stopping: threading.Event) -> None:
    with cluster.client() as client:
        while not stopping.is_set():
            wish = {"prompt": PROMPT * 9, "max_tokens": 1, **GREEDY}
            assert client.post("/v1/completions", json=wish).status_code in (200, 429)


def roles(cluster: Cluster) -> Counter[str]:
    return Counter(i["role"] for i in cluster.instances() if i["role"] != "store")
