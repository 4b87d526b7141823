"""A cluster of vLLM workers on five hosts, whose links can be cut: network namespaces, as in benchmarks.networks."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.testbed import Streams, StreamThread
from benchmarks.networks.cluster import DECODE, FRONT, HTTP_PORT, PREFILL, HostsCluster
from benchmarks.networks.hosts import Network, network
from benchmarks.serving.vllm.deployments import MOONSERVE_CONNECTOR
from moonserve.deploy.launcher.vllm_workers import PATIENCE_S, interpreter_environment
from moonserve.models import demo_model_path

STORE, SECOND_DECODE = 3, 4
DECODE_HOSTS = {"decode-0": DECODE, "decode-1": SECOND_DECODE}
_HOSTS = {"prefill-0": PREFILL, **DECODE_HOSTS}
_NUM_HOSTS = 5
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",  # vLLM looks for its address on a route to the Internet
    "GLOO_SOCKET_IFNAME": "lo",  # and its ranks under the host's name
    "VLLM_NO_USAGE_STATS": "1",
}


class _Processes(HostsCluster):
    _gateway_flags = ("--worker-patience-s", str(PATIENCE_S))  # as `moonserve serve` does

    def __init__(self, net: Network, log_dir: Path, python: str, engine: Sequence[str]) -> None:
        super().__init__(net, log_dir)
        self._python = python
        self._engine = engine

    def _begin_members(self, joined: Sequence[str]) -> list[int]:
        self._wait([self._begin(FRONT, "directory", "--instance-id", "directory", "--port", "7200")])
        registry = f"{self.net.address(FRONT)}:7200"
        # Hosts of one machine would share memory in spite of a cut link.
        extra = {"join": registry, "transports": ["tcp"]}
        transfer = {"kv_role": "kv_both", **MOONSERVE_CONNECTOR, "kv_connector_extra_config": extra}
        flags = ("--engine", "vllm", "--model", str(demo_model_path()), "--kv-cache-memory", "256MiB", *self._engine)
        flags = (*flags, "--vllm.kv-transfer-config", json.dumps(transfer), *joined)
        environ = {**_ENVIRONMENT, **interpreter_environment(self._python)}
        workers = [
            self._begin(
                host,
                "worker",
                *("--role", name.partition("-")[0], "--instance-id", name, *flags),
                python=self._python,
                environ=environ,
            )
            for name, host in _HOSTS.items()
        ]
        store = self._begin(STORE, "store", "--instance-id", "store-0", "--dram", "128MiB", "--join", registry)
        return [*workers, store]


class VllmHosts(Streams):
    """Streams of the cluster, read on the host of its gateway."""

    def __init__(self, net: Network) -> None:
        self._net = net

    def open_stream(self, body: dict[str, Any], name: str) -> StreamThread:
        return StreamThread((self._net.address(FRONT), HTTP_PORT), body, name, partial(self._net.within, FRONT))

    @contextlib.contextmanager
    def cut(self, *pairs: tuple[int, int]) -> Iterator[None]:
        """Drops all packets between the hosts of each pair for the duration of the block."""
        for one, other in pairs:
            self._net.cut(one, other)
            self._net.cut(other, one)
        try:
            yield
        finally:
            for one, other in pairs:
                self._net.heal(one, other)
                self._net.heal(other, one)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        yield
        body = {"prompt": [16], "max_tokens": 8, "temperature": 0}

        def serves() -> bool:
            stream = self.ask(body)
            stream.join()
            return not stream.error

        self.until(serves)


@contextlib.contextmanager
def vllm_hosts(log_dir: Path, python: str, engine: Sequence[str]) -> Iterator[VllmHosts]:
    """Starts the cluster. `python`: interpreter of an environment with vLLM; `engine`: flags of its workers."""
    with network(_NUM_HOSTS) as net:
        processes = _Processes(net, log_dir, python, engine)
        try:
            processes.start()
            yield VllmHosts(net)
        finally:
            processes.stop()
