"""Several active conductors: each has a share of the instances, and no request fails if one is killed or stopped."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from tests.e2e.cluster import Cluster, prompt_of, small_cluster
from tests.e2e.load import busy
from tests.stopping import stop

NAMES = ("conductor-0", "conductor-1")
WORKERS = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
STORES = {"store-0", "store-1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = (
        *("--active-conductors", "2", "--prefill-workers", "2", "--decode-workers", "2", "--store-nodes", "2"),
        *("--kernels", "native", "--num-threads", "1", "--dtype", "float32"),
        *("--ttft-slo", "10000", "--tbt-slo", "10000"),
    )
    with small_cluster(tmp_path_factory.mktemp("active"), *flags, context=4096) as started:
        yield started


def members(cluster: Cluster, name: str) -> set[str]:
    """Returns the instances that a conductor places requests on; empty if it does not answer."""
    request = conductor_pb2.GetClusterRequest()
    view = cluster.rpc_at(cluster.conductor_address(name), conductor_pb2_grpc.ConductorStub, "GetCluster", request)
    return {instance.endpoint.instance_id for instance in view.instances}


def num_decisions(cluster: Cluster, name: str) -> int:
    request = conductor_pb2.ExplainRequest(request_id="none")
    reply = cluster.rpc_at(cluster.conductor_address(name), conductor_pb2_grpc.ConductorStub, "Explain", request)
    return int(reply.num_decisions)


def is_shared(cluster: Cluster) -> bool:
    """True if each conductor has one worker of both roles, and stores are with those whose home they are."""
    parts = [members(cluster, name) for name in NAMES]
    roles = [sorted(name.partition("-")[0] for name in part) for part in parts]
    homes = [{name[-1] for name in part if name.startswith("prefill")} for part in parts]
    stores = [{name[-1] for name in part if name.startswith("store")} for part in parts]
    return roles == [["decode", "prefill", "store"]] * 2 and homes == stores


def test_instances_are_shared_and_requests_reach_both_conductors(cluster: Cluster) -> None:
    """A gateway that has not heard of the shares sends all requests to the conductor that had the instances before."""
    cluster.wait_for("equal shares", lambda: is_shared(cluster))
    # 1 in 10,000 pairs of addresses have less.
    cluster.wait_for("requests at both", lambda: min(placed(cluster, 24)) >= 3)


def placed(cluster: Cluster, num_requests: int) -> list[int]:
    """Sends requests and returns how many of them each conductor has placed."""
    before = [num_decisions(cluster, name) for name in NAMES]
    for number in range(num_requests):
        answer = cluster.complete(prompt_of(f"request {number}", 40), max_tokens=1)
        assert cluster.decisions(answer["id"])[0]["request_id"] == answer["id"].removeprefix("cmpl-")
    counts = [num_decisions(cluster, name) - count for name, count in zip(NAMES, before, strict=True)]
    assert sum(counts) == num_requests
    return counts


def test_a_killed_conductor_costs_no_request_and_gets_its_share_back(cluster: Cluster) -> None:
    cluster.wait_for("equal shares", lambda: is_shared(cluster))
    pid = cluster.pids()[NAMES[0]]
    with busy(cluster) as clients:
        os.kill(pid, signal.SIGKILL)
        clients.wait_for_answers(time.monotonic())
    cluster.wait_for("the restart", lambda: cluster.pids().get(NAMES[0], pid) != pid)
    cluster.wait_for("equal shares again", lambda: is_shared(cluster))


def test_a_stopped_conductor_costs_no_request(cluster: Cluster) -> None:
    cluster.wait_for("equal shares", lambda: is_shared(cluster))
    pid = cluster.pids()[NAMES[1]]
    with busy(cluster) as clients:
        stop(pid)
        try:
            clients.wait_for_answers(time.monotonic())
            cluster.wait_for("the other one with all", lambda: members(cluster, NAMES[0]) == WORKERS | STORES)
        finally:
            os.kill(pid, signal.SIGCONT)
    cluster.wait_for("equal shares again", lambda: is_shared(cluster))
    assert cluster.pids()[NAMES[1]] == pid, "it did not restart"
