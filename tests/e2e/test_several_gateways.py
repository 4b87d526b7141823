"""Three gateways behind one port: any of them explains and counts for all, and its death does not affect the others."""

import json
import os
import re
import signal
from collections.abc import Callable

import httpx2 as httpx
import psutil

from tests.e2e.cluster import UNHURRIED, Cluster

FLAGS = (*UNHURRIED, "--gateways", "3", "--store-nodes", "0")
NAMES = {f"gateway-{number}" for number in range(3)}


def ask(cluster: Cluster, **headers: str) -> httpx.Response:
    """Sends a request on its own connection, so that the kernel chooses a gateway."""
    with cluster.client() as client:
        return client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2}, headers=headers)


def who_answers(cluster: Cluster) -> str:
    """Returns the gateway that a new connection reaches."""
    with cluster.client() as client:
        found = re.search(r'engine="(gateway-\d)"', client.get("/metrics").text)
    assert found is not None
    return found[1]


def test_any_gateway_serves_and_explains_what_another_served(cluster: Cluster) -> None:
    reply = ask(cluster, **{"x-request-id": "my-name"})
    assert reply.status_code == 200
    decisions, reached = [], set()
    for _ in range(40):
        reached.add(who_answers(cluster))
        decisions += [cluster.decisions(known_id)[0] for known_id in ("my-name", reply.json()["id"])]
        if reached == NAMES:
            break
    assert reached == NAMES
    assert len({decision["request_id"] for decision in decisions}) == 1
    for _ in range(5):
        shown = told_by_one(cluster, "/v1/cluster", lambda view: len(json.loads(view)["gateways"]) == len(NAMES))
        assert set(json.loads(shown)["gateways"]) == NAMES


def told_by_one(cluster: Cluster, path: str, is_whole: Callable[[str], bool]) -> str:
    """Returns one gateway's complete reply. Repeats the request on the same connection, because a process that waits
    long for a processor is missing for a while."""
    with cluster.client() as client:
        told = ""

        def is_told() -> bool:
            nonlocal told
            told = client.get(path).text
            return is_whole(told)

        cluster.wait_for("word of everybody", is_told)
        return told


def up(metrics: str) -> dict[str, str]:
    return dict(re.findall(r'^moonserve_up\{process="([^"]+)"\} (\d)$', metrics, re.MULTILINE))


def test_any_gateway_serves_the_metrics_of_all(cluster: Cluster) -> None:
    everybody = {*NAMES, "conductor", "prefill-0", "decode-0"}
    for _ in range(5):
        told = told_by_one(cluster, "/metrics/cluster", lambda text: list(up(text).values()) == ["1"] * len(everybody))
        assert up(told).keys() == everybody
        for name in NAMES:
            assert f'vllm:num_requests_running{{process="{name}"' in told
        for name in everybody:
            assert f'process_resident_memory_bytes{{process="{name}"}}' in told


def test_a_dead_gateway_is_replaced_at_its_port_while_others_serve(cluster: Cluster) -> None:
    before = cluster.pids()
    os.kill(before["gateway-1"], signal.SIGKILL)
    # A dying process loses its command line before its sockets: the kernel still assigns connections to it until then.
    cluster.wait_for("its end", lambda: not psutil.pid_exists(before["gateway-1"]))
    for _ in range(10):
        assert ask(cluster).status_code == 200
    cluster.wait_for("its return", lambda: who_answers(cluster) == "gateway-1")
    assert ask(cluster).status_code == 200
    after = cluster.pids()
    assert {name for name, pid in before.items() if after[name] != pid} == {"gateway-1"}
