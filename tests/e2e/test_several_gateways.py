"""Three gateways behind one port: any of them explains, counts and limits for all, and dies alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from deploy.keys import main as keys
from gateway.access.key_file import KeyFile, read
from gateway.access.key_record import ApiKey, KeyLimits, digest_of
from tests.e2e.cluster import UNHURRIED, Cluster, metric, running_cluster
from tests.patience import PATIENCE_S
from tests.random_models import make_model
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

NAMES = {f"gateway-{number}" for number in range(3)}
LIMIT = 20
LIMITED = [f"limited-{number}" for number in range(5)]
PROBE = LIMITED[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("gateways")
    make_model("llama", made / "model")
    return made


@pytest.fixture(scope="module")
def own_keys(folder: Path) -> dict[str, str]:
    """Without limits, and with one."""
    return {name: f"msk-{name}-{'x' * 40}" for name in ("free", *LIMITED)}


@pytest.fixture(scope="module")
def cluster(folder: Path, own_keys: dict[str, str]) -> Iterator[Cluster]:
    file = KeyFile(folder / "keys.json")
    for name, key in own_keys.items():
        limits = KeyLimits(requests_per_minute=LIMIT) if name in LIMITED else KeyLimits()
        record = ApiKey(digest=digest_of(key.encode()), tenant=name, limits=limits)
        asyncio.run(file.add(record))
    with RedisServer() as redis:
        flags = ("--gateways", "3", "--registry", redis.url, "--store-nodes", "0")
        flags += ("--api-key-file", str(folder / "keys.json"))
        with running_cluster(folder / "model", folder / "logs", *flags, *UNHURRIED) as started:
            yield started


def ask(cluster: Cluster, key: str, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    """On a connection of its own, so that the kernel chooses a gateway."""
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=cluster.url, timeout=PATIENCE_S, headers=headers, verify=False) as client:
        if path == "/v1/completions":
            return client.post(path, json={"prompt": [1, 2, 3], "max_tokens": 2})
        return client.get(path)


def who_answers(cluster: Cluster) -> str:
    """The gateway that a new connection reaches."""
    found = re.search(r'engine="(gateway-\d)"', ask(cluster, "", "/metrics").text)
    assert found is not None
    return found[1]


def test_any_gateway_serves_and_explains_what_another_served(cluster: Cluster, own_keys: dict[str, str]) -> None:
    reply = ask(cluster, own_keys["free"], **{"x-request-id": "my-name"})
    assert reply.status_code == 200
    explained, reached = set(), set()
    for _ in range(40):
        reached.add(who_answers(cluster))
        for known_id in ("my-name", reply.json()["id"]):
            answer = ask(cluster, own_keys["free"], f"/v1/requests/{known_id}/explain")
            assert answer.status_code == 200, answer.text
            explained.add(answer.json()["request_id"])
        if reached == NAMES:
            break
    assert reached == NAMES
    assert len(explained) == 1
    for _ in range(5):
        shown = told_by_one(cluster, own_keys["free"], "/v1/cluster", lists_all)
        assert set(json.loads(shown)["gateways"]) == NAMES


def told_by_one(cluster: Cluster, key: str, path: str, is_whole: Callable[[str], bool]) -> str:
    """What a gateway tells, asked again over the same connection until it has heard of everybody: who waits for a
    processor for long is missing until it has had it."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=cluster.url, timeout=PATIENCE_S, headers=headers, verify=False) as client:
        told = ""

        def is_told() -> bool:
            nonlocal told
            told = client.get(path).text
            return is_whole(told)

        cluster.wait_for("word of everybody", is_told)
        return told


def lists_all(view: str) -> bool:
    return len(json.loads(view)["gateways"]) == len(NAMES)


def up(metrics: str) -> dict[str, str]:
    """By process."""
    return dict(re.findall(r'^moonserve_up\{process="([^"]+)"\} (\d)$', metrics, re.MULTILINE))


def test_any_gateway_tells_the_metrics_of_all(cluster: Cluster) -> None:
    everybody = {*NAMES, "conductor", "prefill-0", "decode-0"}
    for _ in range(5):
        told = told_by_one(
            cluster, "", "/metrics/cluster", lambda text: list(up(text).values()) == ["1"] * len(everybody)
        )
        assert up(told).keys() == everybody
        for name in NAMES:
            assert f'vllm:num_requests_running{{process="{name}"' in told
        for name in everybody:
            assert f'process_resident_memory_bytes{{process="{name}"}}' in told


def test_a_limit_is_one_for_all_gateways(cluster: Cluster, own_keys: dict[str, str]) -> None:
    """While Redis answers within its deadline, which a busy machine may make it miss: then with another key."""
    for name in LIMITED[:-1]:
        cluster.wait_for("Redis", lambda: is_shared(cluster, own_keys[PROBE]))
        before = num_times_alone(cluster)
        with ThreadPoolExecutor(LIMIT) as pool:
            asked = [pool.submit(ask, cluster, own_keys[name]) for _ in range(2 * LIMIT)]
            statuses = [each.result().status_code for each in asked]
        if num_times_alone(cluster) == before:
            break
    else:
        raise AssertionError("Redis was never there")
    assert set(statuses) == {200, 429}
    # One more refills every 3 s: three gateways for themselves would have let all 40 in.
    assert LIMIT <= statuses.count(200) < 2 * LIMIT


def is_shared(cluster: Cluster, key: str) -> bool:
    """Whether no gateway limits for itself. Who does hears with the next request that Redis answers again."""
    if not metric(ask(cluster, "", "/metrics/cluster").text, "moonserve_limits_unshared"):
        return True
    ask(cluster, key)
    return False


def num_times_alone(cluster: Cluster) -> int:
    """How often a gateway began to limit for itself, since Redis did not answer."""
    logs = [(cluster.log_dir / f"{name}.log").read_text() for name in NAMES]
    return sum(log.count("limits are this gateway's own") for log in logs)


def test_a_key_is_revoked_everywhere(cluster: Cluster, folder: Path, own_keys: dict[str, str]) -> None:
    path, digest = folder / "keys.json", digest_of(own_keys[LIMITED[0]].encode())
    (record,) = [key for key in read(path) if key.digest == digest]
    assert keys(["revoke", "--file", str(path), record.key_id], {}) == 0
    cluster.wait_for(
        "every gateway to know",
        lambda: all(ask(cluster, own_keys[LIMITED[0]], "/v1/models").status_code == 401 for _ in range(12)),
    )
    assert ask(cluster, own_keys["free"], "/v1/models").status_code == 200


def test_one_that_dies_is_replaced_at_the_same_port_and_the_others_serve(
    cluster: Cluster, own_keys: dict[str, str]
) -> None:
    before = cluster.pids()
    os.kill(before["gateway-1"], signal.SIGKILL)
    # Its command line goes before its sockets do: the kernel would still deal connections out to it.
    cluster.wait_for("its end", lambda: not psutil.pid_exists(before["gateway-1"]))
    for _ in range(10):
        assert ask(cluster, own_keys["free"]).status_code == 200
    cluster.wait_for("its return", lambda: who_answers(cluster) == "gateway-1")
    assert ask(cluster, own_keys["free"]).status_code == 200
    assert {n: p for n, p in cluster.pids().items() if n != "gateway-1"} == {
        n: p for n, p in before.items() if n != "gateway-1"
    }
