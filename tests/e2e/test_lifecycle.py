"""Starting and stopping: nothing is left behind, and the death of a process is reported."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonserve.protocol.errors import MoonserveError
from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S, until
from tests.random_models import make_model


def assert_nothing_left(cluster: Cluster, pids: list[int], shm_before: set[str]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    until(lambda: not left_in_shm(shm_before))  # segments of other tests may not be mapped yet, or not yet removed
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", cluster.port))


def left_in_shm(before: set[str]) -> set[str]:
    """Returns new segments that no process maps: processes of other tests map theirs."""
    new = set(os.listdir("/dev/shm")) - before
    for process in psutil.process_iter() if new else ():
        with contextlib.suppress(psutil.Error):
            new.difference_update(Path(each.path).name for each in process.memory_maps())
    return new


def test_serve_is_ready_when_it_says_so_and_ctrl_c_stops_everything(model_path: Path, tmp_path: Path) -> None:
    """Ctrl-C stops all processes and leaves nothing, like SIGTERM in the next test."""
    shm_before = set(os.listdir("/dev/shm"))
    cluster = Cluster(model_path, log_dir=tmp_path / "logs")
    cluster.wait_for("the ready line", lambda: "moonserve is ready on" in cluster.output)
    cluster.complete([1, 2, 3], max_tokens=1)
    assert f"curl {cluster.url}" in cluster.output
    pids = [p.pid for p in psutil.Process(cluster.process.pid).children(recursive=True)]
    assert len(pids) == 5
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(PATIENCE_S) == 0
    assert_nothing_left(cluster, pids, shm_before)


def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    shm_before = set(os.listdir("/dev/shm"))
    cluster = Cluster(None, log_dir=tmp_path)
    cluster.wait_for("all processes", lambda: len(cluster.pids()) == 5)
    pids = list(cluster.pids().values())
    assert cluster.stop() == 0
    assert_nothing_left(cluster, pids, shm_before)


def test_no_process_outlives_a_killed_launcher(model_path: Path, tmp_path: Path) -> None:
    cluster = Cluster(model_path, log_dir=tmp_path / "logs")
    cluster.wait_until_ready()
    children = psutil.Process(cluster.process.pid).children()
    cluster.process.kill()
    cluster.process.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


def test_mismatched_weights_are_reported_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model("llama", model)
    weights = load_file(model / "model.safetensors")
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    weights[name] = torch.zeros(3, 3)
    save_file(weights, model / "model.safetensors")
    cluster = Cluster(model, log_dir=tmp_path / "logs")
    with pytest.raises(MoonserveError):
        cluster.wait_until_ready()
    assert cluster.process.returncode == 2
    assert name in cluster.output
    assert "Traceback" not in cluster.output
