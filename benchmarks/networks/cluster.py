"""A cluster on three hosts: conductor and gateway; store and prefill worker; decode worker.

Clients run on the gateway's host, so that an outage never cuts them off from the gateway itself.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.networks.hosts import Network, network
from moonserve.models import demo_model_path
from moonserve.protocol.process.child_process import wait_until_ready

FRONT, PREFILL, DECODE = 0, 1, 2
HOST_NAMES = ("front", "prefill", "decode")

HTTP_PORT = 8000  # of the gateway
_START_S = 180.0
_STOP_S = 30.0
_COMPUTING = ("--model", str(demo_model_path()), "--dtype", "float32", "--num-threads", "1")
_MEMORY = ("--kv-cache-memory", "64MiB")


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's result. `text` is None unless the whole answer arrived."""

    status: int
    """HTTP status; 0 if the connection failed or the request timed out."""
    text: str | None
    seconds: float
    problem: str = ""


class HostsCluster:
    """Cluster whose processes are started one by one, each on its host, as by an operator."""

    _gateway_flags: Sequence[str] = ()

    def __init__(self, net: Network, log_dir: Path) -> None:
        self.net = net
        self.token = secrets.token_hex(8)
        self.log_dir = log_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        self._conductor = f"{net.address(FRONT)}:7100"

    def start(self, *flags: str) -> None:
        """Starts all processes and waits until the gateway serves requests. `flags`: passed to every process."""
        joined = ("--conductor", self._conductor, *flags)
        self._wait([self._begin(FRONT, "conductor", "--instance-id", "conductor", "--port", "7100", *flags)])
        self._wait(self._begin_members(joined))
        gateway = ("--instance-id", "gateway", "--port", str(HTTP_PORT), "--model", str(demo_model_path()))
        self._wait([self._begin(FRONT, "gateway", *gateway, *self._gateway_flags, *joined)])
        give_up_at = time.monotonic() + _START_S
        while self.ask("ready?", max_tokens=1, timeout_s=10.0).status != 200:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the cluster does not serve; logs: {self.log_dir}")
            time.sleep(0.2)

    def _begin_members(self, joined: Sequence[str]) -> list[int]:
        """Starts the store node and the workers."""
        store = ("--instance-id", "store-0", "--dram", "128MiB")
        prefill = ("--instance-id", "prefill-0", "--home-store", "store-0")
        decode = ("--instance-id", "decode-0")
        return [
            self._begin(PREFILL, "store", *store, *joined),
            self._begin(PREFILL, "worker", "--role", "prefill", *prefill, *_COMPUTING, *_MEMORY, *joined),
            self._begin(DECODE, "worker", "--role", "decode", *decode, *_COMPUTING, *_MEMORY, *joined),
        ]

    def ask(self, prompt: str, *, max_tokens: int, timeout_s: float, salt: str | None = None) -> Answer:
        """Requests one greedy completion from the gateway's host; never raises. `salt`: prevents reuse of other KV."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({} if salt is None else {"cache_salt": salt}),
        }
        url = f"http://{self.net.address(FRONT)}:{HTTP_PORT}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return self.net.within(FRONT, lambda: _answer(request, timeout_s))

    def tracebacks(self) -> list[str]:
        """Returns the names of the logs that contain a traceback."""
        files = sorted(self.log_dir.glob("*.log"))
        return [path.name for path in files if "Traceback" in path.read_text()]

    def alive(self) -> bool:
        """Returns True if every started process still runs."""
        return all(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _begin(
        self, host: int, verb: str, *flags: str, python: str = sys.executable, environ: Mapping[str, str] | None = None
    ) -> int:
        """Starts a process; returns the read end of its status pipe."""
        read_fd, write_fd = os.pipe()
        name = flags[flags.index("--instance-id") + 1]
        arguments = ["--host", self.net.address(host), "--status-fd", str(write_fd), *flags]
        with (self.log_dir / f"{name}.log").open("wb") as log:
            process = self.net.start(
                host,
                [python, "-m", "moonserve", verb, *arguments],
                env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": self.token, **(environ or {})},
                pass_fds=[write_fd],
                stdout=log,
                stderr=log,
            )
        os.close(write_fd)
        self._processes.append(process)
        return read_fd

    def _wait(self, status_fds: list[int]) -> None:
        for fd in status_fds:
            asyncio.run(asyncio.wait_for(wait_until_ready(fd), _START_S))


def _answer(request: urllib.request.Request, timeout_s: float) -> Answer:
    began_at = time.monotonic()
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_s) as response:
            reply: Any = json.loads(response.read())
            status, text, problem = response.status, reply["choices"][0]["text"], ""
    except urllib.error.HTTPError as error:
        status, text, problem = error.code, None, error.read().decode(errors="replace")
    except (OSError, ValueError) as error:
        status, text, problem = 0, None, repr(error)
    return Answer(status, text, time.monotonic() - began_at, problem)


@contextlib.contextmanager
def hosts_cluster(log_dir: Path, *flags: str) -> Iterator[HostsCluster]:
    """Starts a cluster on new hosts with perfect links, and waits until it serves requests."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with network(len(HOST_NAMES)) as net:
        cluster = HostsCluster(net, log_dir)
        try:
            cluster.start(*flags)
            yield cluster
        finally:
            cluster.stop()
