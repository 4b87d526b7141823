"""Runs a cluster for the duration of a `with` block, for notebooks, benchmarks and tests.

The cluster is a separate `moonserve serve` process, so that measurements and tests run the code that users run. It ends
when the process that started it ends, for any reason.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from moonserve.deploy.launcher.ports import free_port
from moonserve.protocol.errors import MoonserveError

READY = "moonserve is ready on"  # the launcher's output once all processes are ready
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05


def endpoint_is_ready(url: str) -> bool:
    """Returns True if the endpoint's /ready answers 200. Blocks for 5 s at most."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as response:
            ready: bool = response.status == 200
            return ready
    except (urllib.error.URLError, OSError):
        return False


class LocalCluster:
    """A `moonserve serve` process on a free port of the loopback interface."""

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        log_dir: Path,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_dir = log_dir
        self._output: list[str] = []
        command = [sys.executable, "-m", "moonserve", "serve", *([str(model)] if model else [])]
        command += ["--port", str(self.port), "--log-dir", str(log_dir), *flags]
        command += ["--parent-pid", str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Output of the launcher so far."""
        return "".join(self._output)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until every process is ready and the endpoint takes requests. Raises MoonserveError if the launcher
        ends or the timeout expires."""
        deadline = time.monotonic() + timeout_s
        while READY not in self.output:
            if self.process.poll() is not None:
                self._reader.join()
                raise MoonserveError(f"serve ended with {self.process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                raise MoonserveError(f"not ready within {timeout_s:.0f} s:\n{self.output}")
            time.sleep(_POLL_S)

    def is_ready(self) -> bool:
        return endpoint_is_ready(self.url)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Stops the cluster and returns the launcher's exit code. Store nodes with a disk may need a longer timeout."""
        self.process.terminate()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self._reader.join()
        return code

    def _read_output(self) -> None:
        """Reads the launcher's output, which would block on a full pipe."""
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._output.extend(stream)


@contextlib.contextmanager
def running_cluster(
    model: Path | None,
    *flags: str,
    log_dir: Path,
    environ: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[LocalCluster]:
    """Yields a ready cluster and stops it at the end of the block. `flags`: flags of `moonserve serve`."""
    cluster = LocalCluster(model, *flags, log_dir=log_dir, environ=environ)
    try:
        cluster.wait_until_ready(start_timeout_s)
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.stop()
