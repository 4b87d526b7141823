"""A real cluster of processes under test, and what tests want to know of it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2 as httpx
import psutil

from deploy.local import LocalCluster
from protocol.pb import worker_pb2, worker_pb2_grpc
from protocol.rpc import TOKEN_HEADER
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.stopping import stopped

# One compute thread per worker, exact numbers, objectives that nothing misses, and reads however slow they are.
UNHURRIED = (
    *("--store-reads", "always"),
    *("--dtype", "float32", "--num-threads", "1"),
    *("--ttft-slo", "10000", "--tbt-slo", "10000"),
)

POLL_S = 0.05
"""Most conditions are asked of three processes that share the processors with what is waited for."""


class Cluster(LocalCluster):
    """A `moonserve serve` whose processes can be looked into."""

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        log_dir: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.token = secrets.token_hex(8)
        self.headers: dict[str, str] = {}  # of every request, such as an API key
        own = {"MOONSERVE_CLUSTER_TOKEN": self.token, **(environ or {})}
        super().__init__(model, *flags, log_dir=log_dir, environ=own, port=free_port())

    def wait_until_ready(self, timeout_s: float = 3 * PATIENCE_S) -> None:
        super().wait_until_ready(timeout_s)

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        return super().stop(timeout_s)

    def client(self) -> httpx.Client:
        """Over plain HTTP: without the certificates whose loading takes 30 ms of a processor for every client."""
        return httpx.Client(
            base_url=self.url, timeout=2 * PATIENCE_S, headers=self.headers, verify=False
        )

    def complete(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """One unary completion; fails on any status but 200."""
        with self.client() as client:
            response = client.post("/v1/completions", json={"prompt": prompt, **parameters})
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

    def instances(self) -> list[dict[str, Any]]:
        with self.client() as client:
            listed: list[dict[str, Any]] = client.get("/v1/cluster").json()["instances"]
            return listed

    def instance(self, instance_id: str) -> dict[str, Any]:
        """What the cluster says of a member, which it may have lost for a moment where many processes run."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (found := [i for i in self.instances() if i["instance_id"] == instance_id]):
            assert time.monotonic() < give_up_at, f"{instance_id} is no member"
            time.sleep(0.1)
        return found[0]

    def epoch(self, instance_id: str) -> int:
        """Of the instance's latest start; 0 while it is not a member."""
        found = [i["epoch"] for i in self.instances() if i["instance_id"] == instance_id]
        return found[0] if found else 0

    def status(self, instance_id: str) -> worker_pb2.WorkerStatus:
        """What a worker says of itself, now."""
        found = self.instance(instance_id)
        with grpc.insecure_channel(found["rpc_address"]) as channel:
            return worker_pb2_grpc.WorkerStub(channel).GetStatus(
                worker_pb2.GetStatusRequest(),
                metadata=((TOKEN_HEADER, self.token),),
                timeout=PATIENCE_S,
                wait_for_ready=True,
            )

    def counters(self, instance_id: str) -> dict[str, int]:
        """What a worker counts about itself since its start."""
        return dict(self.status(instance_id).counters)

    def pids(self) -> dict[str, int]:
        """Process id of every instance, by instance id; of two, as there are while one is replaced, the later one's."""
        found: dict[str, tuple[float, int]] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                arguments, begun = child.cmdline(), (child.create_time(), child.pid)
            except psutil.NoSuchProcess:  # it has just ended
                continue
            if "--instance-id" in arguments:
                name = arguments[arguments.index("--instance-id") + 1]
                found[name] = max(found.get(name, begun), begun)
        return {name: pid for name, (_, pid) in found.items()}

    def kill(self, instance_id: str) -> int:
        """SIGKILL. Its epoch before."""
        return self.killer(instance_id)()

    def killer(self, instance_id: str) -> Callable[[], int]:
        """As `kill`, at once when called: what is slow to find out is known by then."""
        epoch, pid = self.epoch(instance_id), self.pids()[instance_id]

        def kill_now() -> int:
            os.kill(pid, signal.SIGKILL)
            return epoch

        return kill_now

    def stopped(self, instance_id: str) -> AbstractContextManager[None]:
        """The process does nothing within the block, as if its machine had hung."""
        return stopped(self.pids()[instance_id])

    def logs(self) -> str:
        """The end of every process's log, for a failing test's message."""
        files = sorted(self.log_dir.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in files)

    def tracebacks(self) -> list[str]:
        """Names of the logs that tell of an exception that nobody expected."""
        files = sorted(self.log_dir.glob("*.log"))
        return [path.name for path in files if "Traceback" in path.read_text()]

    def wait_for(
        self, what: str, condition: Callable[[], bool], timeout_s: float = PATIENCE_S
    ) -> None:
        """Waits until `condition` holds; fails with the cluster's logs when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {timeout_s} s: {what}\n{self.output}\n{self.logs()}"
                )
            time.sleep(POLL_S)


@contextmanager
def running_cluster(
    model: Path | None, log_dir: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A ready cluster that must also stop cleanly. Where many tests run, a worker's successor takes its time."""
    patient = {"MOONSERVE_WORKER_PATIENCE_S": str(PATIENCE_S), **(environ or {})}
    cluster = Cluster(model, *flags, log_dir=log_dir, environ=patient)
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        if cluster.process.poll() is None:
            assert cluster.stop() == 0, cluster.output


def metric(text: str, name: str) -> float:
    """Sum of a metric's samples in the Prometheus text format."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", re.MULTILINE)
    return sum(map(float, pattern.findall(text)))
