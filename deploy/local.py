"""A cluster for as long as a `with` block lasts, for notebooks, benchmarks and tests.

Starts `moonserve serve` in a process of its own, so that what is measured or tested is what users run. It ends with
the process that started it, however that ends.
"""

from __future__ import annotations

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

from deploy.ports import free_port
from protocol.errors import MoonserveError

READY = "moonserve is ready on"  # the launcher's line when everything is
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05


def takes_requests(url: str) -> bool:
    """Whether the endpoint's /ready answers 200. Blocks for 5 s at most."""
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
        command = [sys.executable, "-m", "deploy", "serve", *([str(model)] if model else [])]
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
        """What the launcher has printed."""
        return "".join(self._output)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when every process is ready and the endpoint takes requests. Raises MoonserveError when they do not
        come up."""
        deadline = time.monotonic() + timeout_s
        while READY not in self.output:
            if self.process.poll() is not None:
                self._reader.join()
                raise MoonserveError(f"serve ended with {self.process.returncode}:\n{self.output}")
            if time.monotonic() > deadline:
                raise MoonserveError(f"not ready within {timeout_s:.0f} s:\n{self.output}")
            time.sleep(_POLL_S)

    def is_ready(self) -> bool:
        return takes_requests(self.url)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Stops everything and returns the launcher's exit code. Store nodes with a disk may need longer than usual."""
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
        """Keeps the launcher's pipe empty, or it would block."""
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._output.extend(stream)


@contextlib.contextmanager
def running(
    model: Path | None,
    *flags: str,
    log_dir: Path,
    environ: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[LocalCluster]:
    """A ready cluster, stopped at the end of the block. `flags`: those of `moonserve serve`."""
    cluster = LocalCluster(model, *flags, log_dir=log_dir, environ=environ)
    try:
        cluster.wait_until_ready(start_timeout_s)
        yield cluster
    finally:
        if cluster.process.poll() is None:
            cluster.stop()
