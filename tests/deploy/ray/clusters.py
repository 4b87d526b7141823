"""A real Ray cluster of several raylets on this machine, and a moonserve cluster on it, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import yaml

from deploy.ray.config import ClusterConfig, parse_cluster
from deploy.ray.driver import Deployment, NotThere, deploy, leftovers
from deploy.ray.events import TakeDown
from tests.background import Background
from tests.patience import PATIENCE_S, until
from tests.ports import free_port

OBJECT_STORE_BYTES = 80 * 2**20  # nothing of ours goes through it
TOKEN = "a-token-of-the-test"
WORK = {"prefill": 3.0, "decode": 3.0}
PAUSE_S = 0.1
"""Of a client between two requests: there are always some under way, and the processors are for what starts."""
RAYLET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",
}


@contextmanager
def ray_cluster(num_hosts: int) -> Iterator[Any]:
    """A head that has no place for workers, and so many hosts that have; connected to it while the block lasts."""
    from ray.cluster_utils import Cluster

    from deploy.ray.driver import connect

    os.environ.update(RAYLET_ENVIRONMENT)
    common = {"object_store_memory": OBJECT_STORE_BYTES}
    head = {"num_cpus": 2, "resources": {"gateway": 2}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **common})
    try:
        for _ in range(num_hosts):
            cluster.add_node(num_cpus=8, resources=WORK, **common)
        connect(cluster.address)
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


def kill_raylet(cluster: Any, node_id: str) -> None:
    """SIGKILL. Ray's workers look whether its process exists, so it must not stay as a zombie of ours."""
    [node] = [each for each in cluster.worker_nodes if each.node_id == node_id]
    [raylet] = node.all_processes["raylet"]
    raylet.process.kill()
    raylet.process.wait()


def document(log_dir: Path, **more: Any) -> dict[str, Any]:
    """2 prefill and 2 decode workers of the demo model, two conductors, two gateways."""
    return {
        "name": "test",
        "conductors": {"count": 2, "port": two_ports()},
        "directory": {"port": free_port()},
        "gateways": {"count": 2, "resources": {"gateway": 1}},
        "prefill": {"count": 2, "min": 2, "max": 3, "resources": {"prefill": 1}},
        "decode": {"count": 2, "min": 2, "max": 3, "resources": {"decode": 1}},
        "drain_s": 10,
        "serve": {
            "port": free_port(),
            "dtype": "float32",
            "num_threads": 1,
            "ttft_slo": 10000,
            "tbt_slo": 10000,
            "dram": "32MiB",
            "kv_cache_memory": "16MiB",
            "log_dir": str(log_dir),
        },
        **more,
    }


def two_ports() -> int:
    """The first of two neighbouring ports that nobody else gets."""
    first = free_port()
    while (second := free_port()) != first + 1:
        first = second
    return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Deployed:
    """A moonserve cluster on Ray, asked as its users and operators do."""

    def __init__(self, config: ClusterConfig, deployment: Deployment, log_dir: Path) -> None:
        self.config, self.deployment, self.log_dir = config, deployment, log_dir
        self.url = f"http://127.0.0.1:{config.serve.port}"
        self.timeline: list[tuple[float, str]] = []
        self._began_at = time.monotonic()

    def mark(self, text: str) -> None:
        """For the timeline."""
        self.timeline.append((time.monotonic() - self._began_at, text))

    def told(self) -> str:
        """The timeline, a line each."""
        return "".join(f"{at_s:6.1f} s  {text}\n" for at_s, text in self.timeline)

    def wait(self, what: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        status = self.deployment.wait(until, 3 * PATIENCE_S, lambda text: None)
        self.mark(what)
        return status

    def again(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
        """As `wait`, while there may be no controller to ask."""

        def answers() -> bool:
            try:
                return holds(self.deployment.status())
            except NotThere:
                return False

        until(answers, 2 * PATIENCE_S)
        self.mark(what)

    def processes(self) -> dict[str, dict[str, Any]]:
        return {process["name"]: process for process in self.deployment.status()["processes"]}

    def settled(self, what: str) -> dict[str, Any]:
        """When everything that is wanted serves, and nothing restarts."""
        return self.wait(what, lambda s: s["is_whole"] and not s["is_restarting"])

    def names(self, kind: str) -> set[str]:
        processes = self.deployment.status()["processes"]
        return {p["name"] for p in processes if p["kind"] == kind and not p["is_leaving"]}

    def complete(self, prompt: list[int], **parameters: Any) -> list[int]:
        """Token ids of a greedy completion; fails on any status but 200."""
        with httpx.Client(timeout=2 * PATIENCE_S, verify=False) as client:  # plain HTTP
            return completion(client, self.url, prompt, **parameters)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`moonserve deploy …` in a process of its own."""
        import ray

        address = ray.get_runtime_context().gcs_address
        return subprocess.run(
            [sys.executable, "-m", "deploy", "deploy", *arguments, "--address", address],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )

    def logs(self) -> str:
        files = sorted(self.log_dir.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in files)


def completion(client: httpx.Client, url: str, prompt: list[int], **parameters: Any) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **parameters}
    response = client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True})
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


class Checking(Background):
    """Clients that know the right tokens in advance and ask again and again; at the end nothing may have failed."""

    def __init__(
        self, deployed: Deployed, prompts: list[list[int]], expected: list[list[int]]
    ) -> None:
        super().__init__(
            partial(self._ask, prompt, tokens)
            for prompt, tokens in zip(prompts, expected, strict=True)
        )
        self._deployed = deployed
        self.num_answered = 0

    def stop(self) -> None:
        super().stop()
        if not self.failures and not self.num_answered:
            self.failures.append("nothing was answered")

    def _ask(self, prompt: list[int], expected: list[int]) -> None:
        while not self.stopping.is_set():
            # A connection each: one that is kept may be to a gateway that stops.
            found = self._deployed.complete(prompt, max_tokens=len(expected))
            assert found == expected, f"{found} instead of {expected}"
            with self.lock:
                self.num_answered += 1
            self.stopping.wait(PAUSE_S)


@contextmanager
def deployed(log_dir: Path, **more: Any) -> Iterator[Deployed]:
    """Whole within the block, unless it has been taken down there; afterwards nothing of it is left."""
    config = parse_cluster(yaml.safe_load(yaml.safe_dump(document(log_dir, **more))))
    cluster = Deployed(config, deploy(config, TOKEN), log_dir)
    try:
        cluster.settled("deployed: everything serves")
        yield cluster
    except Exception as error:
        error.add_note(cluster.logs())
        raise
    finally:
        take_down(cluster)


def take_down(cluster: Deployed) -> None:
    """Checks that nothing is left: processes, actors, placement groups, ports."""
    cluster.deployment.wish(TakeDown())
    cluster.wait("taken down", lambda status: status["has_ended"])
    until(lambda: not leftovers(cluster.config.name))  # Ray's head hears of the last one by and by
    cluster.deployment.end()
    assert ours() == []
    assert _is_free(cluster.config.serve.port)


def ours() -> list[str]:
    """Command lines of processes of the deployed cluster, by its token."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MOONSERVE_CLUSTER_TOKEN") == TOKEN:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
