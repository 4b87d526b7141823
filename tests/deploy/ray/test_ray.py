"""Tests of a cluster on a real Ray of three raylets: it is deployed, damaged, scaled and taken down while clients check
its tokens. All tests share one cluster and run in order: each starts with the cluster as the previous one left it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import yaml

from moonserve.deploy.launcher.ports import free_port
from moonserve.deploy.launcher.process_specs import ProcessKind
from moonserve.deploy.ray.command import Deployment, NotDeployed, connect, deploy
from moonserve.deploy.ray.config import ClusterConfig, parse_cluster
from moonserve.deploy.ray.events import RemoveCluster, RemoveProcess, Scale
from moonserve.protocol.errors import ConfigError
from tests.background import Background
from tests.patience import PATIENCE_S, until
from tests.stopping import stopped

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own warnings, which differ by release

TOKEN = "a-token-of-the-test"
PROMPTS = [list(range(10 * number, 10 * number + 40)) for number in range(1, 4)]
PAUSE_S = 0.5  # between two requests of a client, which leaves the CPU to starting processes
SERVE = {"dtype": "float32", "num_threads": 1, "ttft_slo": 10000, "tbt_slo": 10000, "dram": "32MiB"}
SERVE |= {"kv_cache_memory": "16MiB"}
RAYLET_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0", "RAY_worker_niceness": "0"}


@contextmanager
def ray_cluster(num_hosts: int) -> Iterator[Any]:
    """Yields a Ray cluster of a head without room for workers and `num_hosts` hosts with room. Connects to it."""
    from ray.cluster_utils import Cluster

    os.environ.update(RAYLET_ENVIRONMENT)
    common = {"object_store_memory": 80 * 2**20}  # moonserve does not use it
    head = {"num_cpus": 2, "resources": {"gateway": 2}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **common})
    try:
        for _ in range(num_hosts):
            cluster.add_node(num_cpus=8, resources={"prefill": 3.0, "decode": 3.0}, **common)
        connect(cluster.address)
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()


def document(log_dir: Path) -> dict[str, Any]:
    """Returns a configuration with two workers of each role for the demo model, two conductors and two gateways."""
    return {
        "name": "test",
        "conductors": {"count": 2, "port": free_port(2)},
        "directory": {"port": free_port()},
        "gateways": {"count": 2, "resources": {"gateway": 1}},
        "prefill": {"count": 2, "resources": {"prefill": 1}},
        "decode": {"count": 2, "resources": {"decode": 1}},
        "drain_s": 10,
        "serve": {"port": free_port(), "log_dir": str(log_dir), **SERVE},
    }


def ours() -> list[str]:
    """Returns the command lines of the deployed cluster's processes, which its token identifies."""
    known = [process.info for process in psutil.process_iter(["environ", "cmdline"], ad_value={})]
    return [" ".join(each["cmdline"]) for each in known if each["environ"].get("MOONSERVE_CLUSTER_TOKEN") == TOKEN]


class Deployed:
    """A moonserve cluster on Ray, with the requests of its users and operators."""

    def __init__(self, config: ClusterConfig, deployment: Deployment, log_dir: Path) -> None:
        self.config, self.deployment, self.log_dir = config, deployment, log_dir
        self.url = f"http://127.0.0.1:{config.serve.port}/v1/completions"

    def wait(self, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return self.deployment.wait(until, 3 * PATIENCE_S, lambda text: None)

    def settled(self) -> dict[str, Any]:
        """Waits until every wanted process serves and none restarts, and returns the status."""
        return self.wait(lambda s: s["is_whole"] and not s["is_restarting"])

    def processes(self) -> dict[str, dict[str, Any]]:
        return {process["name"]: process for process in self.deployment.status()["processes"]}

    def names(self, kind: str) -> set[str]:
        return {n for n, p in self.processes().items() if p["kind"] == kind and not p["is_leaving"]}

    def complete(self, prompt: list[int]) -> list[int]:
        """Returns the token ids of a greedy completion; fails on any status but 200. Opens a connection per request: a
        kept one may lead to a gateway that stops."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        with httpx.Client(timeout=2 * PATIENCE_S, verify=False) as client:  # plain HTTP
            response = client.post(self.url, json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def command(self, *arguments: str) -> str:
        """Runs `moonserve deploy …` in a separate process and returns its output."""
        import ray

        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "moonserve", "deploy", *arguments, "--address", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def checking(cluster: Deployed, expected: list[list[int]]) -> Iterator[None]:
    """Runs clients that repeat requests with known tokens; at the end, none may have failed or got wrong tokens."""
    answered = threading.Event()

    def ask(prompt: list[int], tokens: list[int]) -> None:
        while not clients.stopping.is_set():
            found = cluster.complete(prompt)
            assert found == tokens, f"{found} instead of {tokens}"
            answered.set()
            clients.stopping.wait(PAUSE_S)

    clients = Background(partial(ask, *each) for each in zip(PROMPTS, expected, strict=True))
    with clients:
        yield
    assert answered.is_set(), "nothing was answered"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with ray_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(hosts: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A complete cluster. Afterwards no process, actor, placement group, port or shared memory of it may remain."""
    from moonserve.deploy.ray.ray_calls import leftovers

    folder, shared = tmp_path_factory.mktemp("ray"), set(os.listdir("/dev/shm"))
    config = parse_cluster(yaml.safe_load(yaml.safe_dump(document(folder))))
    cluster = Deployed(config, deploy(config, TOKEN), folder)
    try:
        cluster.settled()
        yield cluster
    except Exception as error:
        logs = sorted(folder.glob("*.log"))
        error.add_note("\n".join(f"== {each.name}\n{each.read_text()[-3000:]}" for each in logs))
        raise
    finally:
        assert len(ours()) >= len(cluster.processes()), "what is left would be seen"
        cluster.deployment.send(RemoveCluster())
        cluster.wait(lambda status: status["has_ended"])
        until(lambda: not leftovers(config.namespace))  # Ray's head learns of the last with delay
        cluster.deployment.end()
        until(lambda: not ours())  # a process whose actor was killed still drains
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", config.serve.port)) != 0
    assert not [n for n in set(os.listdir("/dev/shm")) - shared if "moonserve" in n]


@pytest.fixture(scope="module")
def expected(cluster: Deployed) -> list[list[int]]:
    """Tokens that the undisturbed cluster returns for `PROMPTS`."""
    return [cluster.complete(prompt) for prompt in PROMPTS]


def test_actors_are_named_detached_spread_and_beside_their_store(cluster: Deployed) -> None:
    import ray
    from ray.util import list_named_actors

    from moonserve.deploy.ray.ray_calls import HEAD

    status = cluster.deployment.status()
    named = list_named_actors(all_namespaces=True)
    assert {p["name"] for p in status["processes"]} | {"controller"} == {
        each["name"] for each in named if each["namespace"] == cluster.config.namespace
    }
    [head] = [node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]]
    assert status["controller_node_id"] == head
    nodes: dict[str, list[str]] = {}
    for process in status["processes"]:
        nodes.setdefault(process["kind"], []).append(process["node_id"])
    for kind in ("prefill", "decode", "store"):
        assert len(nodes[kind]) == len(set(nodes[kind])) == 2
    assert set(nodes["prefill"]) == set(nodes["store"])
    groups = [each for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
    assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
    assert len(groups) == len(status["processes"])


def test_status_lists_each_process_with_its_host(cluster: Deployed) -> None:
    assert "test: serves" in cluster.command("status")
    wanted = {"conductor": 2, "prefill": 2, "decode": 2, "gateway": 2}
    assert cluster.deployment.status()["wanted"] == wanted
    assert "ready" in cluster.deployment.tail("decode-0")


def test_processes_of_a_killed_raylet_start_elsewhere(hosts: Any, cluster: Deployed, expected: list[list[int]]) -> None:
    """A decode worker there and its actor hang meanwhile. The actor dies with its raylet, the worker when it resumes.
    Its successor serves by then, and no client gets wrong tokens."""
    before = cluster.processes()
    zombie = psutil.Process(before["decode-0"]["pid"])
    actor = psutil.Process(zombie.ppid())
    lost_node = before["decode-0"]["node_id"]
    moving = {n for n, p in before.items() if p["node_id"] == lost_node} - {"store-1", "store-2"}
    with checking(cluster, expected), stopped(actor.pid):
        with stopped(zombie.pid):
            [raylet] = next(n for n in hosts.worker_nodes if n.node_id == lost_node).all_processes["raylet"]
            raylet.process.kill()
            raylet.process.wait()  # Ray's workers check for its process, which a zombie still is
            cluster.wait(lambda s: all(p["node_id"] != lost_node for p in s["processes"]))
            status = cluster.settled()
        until(lambda: has_ended(zombie))
    until(lambda: has_ended(actor))
    now = {process["name"]: process for process in status["processes"]}
    assert moving <= set(now)
    for name in moving:
        assert now[name]["generation"] > before[name]["generation"]


def has_ended(process: psutil.Process) -> bool:
    """Returns True if the process has ended, even if its parent has not reaped it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_scaling_adds_a_worker_and_draining_takes_one_away(cluster: Deployed, expected: list[list[int]]) -> None:
    with checking(cluster, expected):
        cluster.command("scale", "prefill=3")
        assert cluster.names("prefill") == {"prefill-0", "prefill-1", "prefill-2"}
        cluster.deployment.send(RemoveProcess(name="prefill-0"))
        cluster.settled()
    assert cluster.names("prefill") == {"prefill-1", "prefill-2"}
    with pytest.raises(ConfigError, match="stores follow the hosts"):
        cluster.deployment.send(Scale(kind=ProcessKind.STORE, count=3))


def test_a_controller_that_dies_is_restarted_and_changes_nothing(cluster: Deployed, expected: list[list[int]]) -> None:
    """Additionally, an actor that dies ends its process, and Ray restarts both on their host."""
    status = cluster.deployment.status()
    before = cluster.processes()
    with checking(cluster, expected):
        os.kill(status["controller_pid"], signal.SIGKILL)
        os.kill(psutil.Process(before["prefill-1"]["pid"]).ppid(), signal.SIGKILL)
        until(lambda: is_back(cluster, before["prefill-1"]["pid"]), 2 * PATIENCE_S)
    now = cluster.processes()
    assert cluster.deployment.status()["controller_pid"] != status["controller_pid"]
    assert set(now) == set(before)
    for name in now:
        assert now[name]["node_id"] == before[name]["node_id"]
        assert now[name]["generation"] == before[name]["generation"]
        assert (now[name]["pid"] == before[name]["pid"]) == (name != "prefill-1")


def is_back(cluster: Deployed, old_pid: int) -> bool:
    """Returns True if the cluster is whole and `prefill-1` has a new process; False without a controller."""
    with contextlib.suppress(NotDeployed):
        status = cluster.deployment.status()
        pids = {process["name"]: process["pid"] for process in status["processes"]}
        return bool(status["is_whole"]) and pids["prefill-1"] != old_pid
    return False
