"""iperf3 with one stream. It sends the same small buffer repeatedly, so its memory is never cold."""

import json
import socket
import subprocess
from typing import Any

import numpy as np

from benchmarks.transfer import contestant
from benchmarks.transfer.workload import MIB, Load

LARGEST_BLOCK = MIB
"""iperf3's limit of --length."""
BYTES = {4096: 256 * MIB}
DEFAULT_BYTES = 1024 * MIB


class Target(contestant.Target):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = np.zeros(0, np.uint8)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        arguments = ["iperf3", "--server", "--bind", "127.0.0.1", "--port", str(self._port)]
        self._server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)

    def hello(self) -> dict[str, Any]:
        return {"port": self._port}

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


class Initiator(contestant.Initiator):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.pool = np.zeros(0, np.uint8)

    def connect(self, other: dict[str, Any]) -> None:
        self._port = other["port"]

    def prepare(self, load: Load, mode: str) -> None:
        self.load = load

    def run(self, min_s: float) -> dict[str, Any]:
        nbytes = BYTES.get(self.load.block_bytes, DEFAULT_BYTES)
        arguments = ["iperf3", "--json", "--client", "127.0.0.1", "--port", str(self._port)]
        arguments += ["--length", str(self.load.block_bytes), "--bytes", str(nbytes)]
        arguments += ["--reverse"] if self.load.op == "read" else []
        result = json.loads(subprocess.run(arguments, capture_output=True, check=False).stdout)
        if "error" in result:
            raise OSError(result["error"])
        end = result["end"]
        both = end["cpu_utilization_percent"]
        seconds = end["sum_received"]["seconds"]
        cpu_s = (both["host_total"] + both["remote_total"]) / 100 * seconds
        return {"bytes": end["sum_received"]["bytes"], "seconds": seconds, "cpu_s": cpu_s}
