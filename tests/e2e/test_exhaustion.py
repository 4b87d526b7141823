"""Exhausted descriptors, log disk and /dev/shm: requests wait, are refused or are unaffected, and no process ends.

docs/faults.md lists what else can run out, and the test for each.
"""

import os
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import psutil
import pytest

from tests.e2e.cluster import GREEDY, UNHURRIED, Cluster, prompt_of, running_cluster, tokens_of
from tests.kvstore.faults.mounts import fill_up, mounted
from tests.random_models import make_model

FLAGS = (*UNHURRIED, "--kv-cache-memory", "8MiB", "--transfer-timeout-s", "2")
NUM_CLIENTS = 12
LOG_BYTES = 2**20
KNOWN = prompt_of("known", 100)  # its answer is compared

# Wrapper that gives a process and its children a /dev/shm that is full from the beginning.
WITHOUT_SHM = """#!/bin/sh
exec unshare --mount sh -c '
mount -t tmpfs -o size=4k tmpfs /dev/shm &&
{{ cat /dev/zero > /dev/shm/filler 2>/dev/null; exec {python} "$@"; }}' sh "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Cluster with a small disk for logs and a full /dev/shm. Shared memory has no name in /dev/shm (memfd_create(2)),
    so that no container's limit on it applies."""
    folder: Path = tmp_path_factory.mktemp("exhaustion")
    make_model("llama", folder / "model")
    wrapper = folder / "python"
    wrapper.write_text(WITHOUT_SHM.format(python=sys.executable))
    wrapper.chmod(0o755)
    with mounted(folder / "logs", LOG_BYTES) as logs, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(wrapper))
        with running_cluster(folder / "model", logs, *FLAGS) as started:
            patched.undo()
            yield started


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[int]:
    """Correct tokens, computed while only /dev/shm was full."""
    return tokens_of(cluster.greedy(KNOWN, 8))


def ask(cluster: Cluster, prompt: list[int]) -> httpx.Response:
    """Sends a request on its own connection."""
    with cluster.client() as client:
        return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **GREEDY})


def test_a_full_dev_shm_fails_no_request(cluster: Cluster, wanted: list[int]) -> None:
    shm = os.statvfs(f"/proc/{cluster.pids()['decode-0']}/root/dev/shm")
    assert (shm.f_bavail, shm.f_blocks * shm.f_frsize) == (0, 4096)
    assert len(wanted) == 8
    assert not cluster.tracebacks(), cluster.logs()


@contextmanager
def few_descriptors(pid: int) -> Iterator[None]:
    """Prevents the process from opening more descriptors within the block."""
    process = psutil.Process(pid)
    before = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), before[1]))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "store-0", "conductor"])
def test_without_descriptors_requests_wait_or_are_refused(cluster: Cluster, wanted: list[int], name: str) -> None:
    pid = cluster.pids()[name]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, few_descriptors(pid):
        replies = list(pool.map(lambda number: ask(cluster, prompt_of(number, 100)), range(NUM_CLIENTS)))
    assert {reply.status_code for reply in replies} <= {200, 429, 503}
    cluster.wait_for(
        "the same answer as before",
        lambda: (reply := ask(cluster, KNOWN)).status_code == 200 and tokens_of(reply.json()) == wanted,
    )
    assert cluster.pids()[name] == pid, "it did not end"


def test_a_full_disk_under_the_logs_costs_only_log_lines(cluster: Cluster, wanted: list[int]) -> None:
    """A full log disk costs only log lines, also for a process that starts meanwhile."""
    filler = fill_up(cluster.log_dir)
    try:
        epoch = cluster.kill("store-0")
        assert tokens_of(cluster.greedy(KNOWN, 8)) == wanted
        cluster.wait_for("its successor", lambda: cluster.epoch("store-0") > epoch)
        assert tokens_of(cluster.greedy(KNOWN, 8)) == wanted
    finally:
        filler.unlink()
