"""A cluster on a real Ray of three raylets: deployed, hit, changed and taken away, while clients that know the right
tokens go on asking. One cluster for all, whose tests go in their order: each takes the cluster as the one before left
it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.ray.events import Leave, RestartAll, Scale
from deploy.ray.units import Kind
from protocol.errors import ConfigError
from tests.deploy.ray.clusters import (
    Checking,
    Deployed,
    deployed,
    kill_raylet,
    ours,
    ray_cluster,
)
from tests.patience import PATIENCE_S, until
from tests.public_trace import TRACE, needs_trace
from tests.stopping import stop

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of which there are several in each release
]

PROMPTS = [list(range(10 * number, 10 * number + 40)) for number in range(1, 4)]
AUTOSCALE = {"high": 0.35, "low": 0.01, "up_hold_s": 1, "down_hold_s": 3, "cool_down_s": 1}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Any]:
    with ray_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(hosts: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("ray")
    shared = set(os.listdir("/dev/shm"))
    with deployed(folder, autoscale=AUTOSCALE) as cluster:
        yield cluster
    sys.stdout.write("\n" + cluster.told())  # pytest -s: the timeline of docs/ray.md
    left = {name for name in set(os.listdir("/dev/shm")) - shared if "moonserve" in name}
    assert not left


@pytest.fixture(scope="module")
def expected(cluster: Deployed) -> list[list[int]]:
    """What an undisturbed cluster answers."""
    answers = [cluster.complete(prompt, max_tokens=16) for prompt in PROMPTS]
    cluster.mark("first answers")
    return answers


def test_actors_are_named_detached_spread_and_beside_their_store(cluster: Deployed) -> None:
    import ray
    from ray.util import list_named_actors

    from deploy.ray.actors import HEAD

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
    groups = ray.util.placement_group_table().values()
    assert {group["strategy"] for group in groups} == {"STRICT_PACK"}
    assert len(groups) == len(status["processes"])


def test_the_terminal_tells_what_runs_where(cluster: Deployed) -> None:
    shown = cluster.command("status")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "test: serves" in shown.stdout
    wanted = {"conductor": 2, "prefill": 2, "decode": 2, "gateway": 2}
    assert cluster.deployment.status()["wanted"] == wanted
    assert "ready" in cluster.deployment.tail("decode-0")


def test_a_killed_raylet_costs_no_request_and_its_processes_start_elsewhere(
    hosts: Any, cluster: Deployed, expected: list[list[int]]
) -> None:
    """A decode worker there, and its actor, stand still meanwhile. The actor dies with its raylet, the worker when it
    wakes and sees that; its successor serves by then, and nobody is answered wrongly."""
    before = cluster.processes()
    zombie = psutil.Process(before["decode-0"]["pid"])
    actor = psutil.Process(zombie.ppid())
    lost_node = before["decode-0"]["node_id"]
    moving = {n for n, p in before.items() if p["node_id"] == lost_node} - {"store-1", "store-2"}
    with Checking(cluster, PROMPTS, expected), hung(actor):
        with hung(zombie):
            kill_raylet(hosts, lost_node)
            cluster.mark("a raylet is killed")
            cluster.wait(
                "its processes are given up",
                lambda s: all(p["node_id"] != lost_node for p in s["processes"]),
            )
            status = cluster.settled("all of them serve elsewhere")
        cluster.mark("a decode worker of the lost machine wakes")
        until(lambda: has_ended(zombie))
        cluster.mark("it has ended")
    until(lambda: has_ended(actor))
    now = {process["name"]: process for process in status["processes"]}
    assert moving <= set(now)
    for name in moving:
        assert now[name]["generation"] > before[name]["generation"]


@contextmanager
def hung(process: psutil.Process) -> Iterator[None]:
    """It does nothing within the block."""
    stop(process.pid)
    try:
        yield
    finally:
        if not has_ended(process):
            process.resume()


def has_ended(process: psutil.Process) -> bool:
    """Also where its parent has not looked."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_scaling_adds_a_worker_and_draining_takes_one_away(
    cluster: Deployed, expected: list[list[int]]
) -> None:
    with Checking(cluster, PROMPTS, expected):
        assert cluster.command("scale", "prefill=3").returncode == 0
        cluster.mark("scaled to 3 prefill workers")
        assert cluster.names("prefill") == {"prefill-0", "prefill-1", "prefill-2"}
        cluster.deployment.wish(Leave(name="prefill-0"))
        cluster.settled("prefill-0 drained")
    assert cluster.names("prefill") == {"prefill-1", "prefill-2"}
    with pytest.raises(ConfigError, match="stores follow the hosts"):
        cluster.deployment.wish(Scale(kind=Kind.STORE, count=3))


def test_a_rolling_restart_fails_no_request(cluster: Deployed, expected: list[list[int]]) -> None:
    names = ("decode-0", "gateway-0", "conductor-0")
    before = cluster.processes()
    with Checking(cluster, PROMPTS, expected):
        cluster.deployment.wish(RestartAll(names=names))
        cluster.settled("three processes restarted, one after the other")
    now = cluster.processes()
    for name in names:
        assert now[name]["life"] == before[name]["life"] + 1
        assert now[name]["pid"] != before[name]["pid"]


def test_a_controller_that_dies_starts_again_and_changes_nothing(
    cluster: Deployed, expected: list[list[int]]
) -> None:
    """And an actor that dies takes its process along, and Ray starts both again on their host."""
    status = cluster.deployment.status()
    before = cluster.processes()
    with Checking(cluster, PROMPTS, expected):
        os.kill(status["controller_pid"], signal.SIGKILL)
        os.kill(psutil.Process(before["prefill-1"]["pid"]).ppid(), signal.SIGKILL)
        cluster.mark("the controller and an actor are killed")
        cluster.again(
            "both are back",
            lambda s: s["is_whole"] and pids(s)["prefill-1"] != before["prefill-1"]["pid"],
        )
    now = cluster.processes()
    assert cluster.deployment.status()["controller_pid"] != status["controller_pid"]
    assert set(now) == set(before)
    for name in now:
        assert now[name]["node_id"] == before[name]["node_id"]
        assert now[name]["generation"] == before[name]["generation"]
        assert (now[name]["pid"] == before[name]["pid"]) == (name != "prefill-1")


def pids(status: dict[str, Any]) -> dict[str, int]:
    return {process["name"]: process["pid"] for process in status["processes"]}


@needs_trace
@pytest.mark.trace
def test_the_public_trace_replays_without_a_failure(cluster: Deployed, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = (
        "--limit",
        "20",
        "--scale-lengths",
        "0.03",
        "--scale-outputs",
        "0.03",
        "--speedup",
        "4",
    )
    command = [sys.executable, "-m", "deploy", "replay", str(TRACE), "--url", cluster.url, *flags]
    done = subprocess.run(
        [*command, "--output", str(report)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    assert (told["completed"], told["failed"], told["rejected"]) == (20, 0, 0)
    cluster.mark("20 requests of the conversation trace replayed")


def test_load_that_lasts_gets_another_worker_which_leaves_after_it(cluster: Deployed) -> None:
    """Long answers hold most of the decode workers' memory, which counts as load; they follow one another until that
    is noticed. Nothing is decided before the new one is a member, so that it can only leave after it has come."""
    prompts = [list(range(number, number + 600)) for number in range(4)]
    noticed = threading.Event()

    def ask(prompt: list[int]) -> None:
        while not noticed.is_set():
            assert len(cluster.complete(prompt, max_tokens=600)) == 600

    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(ask, each) for each in prompts]
        cluster.mark("four long answers begin")
        try:
            cluster.wait("a third decode worker, by load", lambda s: s["wanted"]["decode"] == 3)
        finally:
            noticed.set()
        for answer in answers:
            answer.result()
    cluster.wait("two are enough again", lambda s: s["wanted"]["decode"] == 2)
    cluster.settled("one has drained and left")
    assert len(cluster.names("decode")) == 2


def test_nothing_of_it_is_anybody_elses(cluster: Deployed) -> None:
    """The fixture's end checks that nothing is left; that it would see something is checked here."""
    assert len(ours()) >= len(cluster.deployment.status()["processes"])
