"""Reads a process's metrics as Prometheus does, and runs a real Prometheus on a free port for the duration of a test.
The system's Prometheus service is never used."""

import contextlib
import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moonserve.deploy.launcher.ports import free_port
from tests.patience import PATIENCE_S, until
from tests.processes import binary


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as response:
        text: str = response.read().decode()
        return text


class Prometheus:
    """Running Prometheus server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns the `data` of the answer. Raises HTTPError with the reason if the server refuses."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=PATIENCE_S) as response:
            return json.load(response)["data"]

    def values(self, expression: str) -> list[float]:
        """Returns the values of an instant query, one per series."""
        found = self.ask("query", query=expression)["result"]
        return [float(series["value"][1]) for series in found]


@contextlib.contextmanager
def running_prometheus(config: Path, folder: Path) -> Iterator[Prometheus]:
    """Runs Prometheus within the block. `folder`: for its data and its log."""
    port = free_port()
    command = [binary("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(port)

        def answers() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with contextlib.suppress(OSError):
                return bool(prometheus.ask("status/runtimeinfo"))
            return False

        until(answers)
        yield prometheus
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
