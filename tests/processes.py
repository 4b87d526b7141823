"""Processes that tests run to their end, or start singly and find by their ready report. Clusters: `tests.e2e`."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from moonserve.protocol.process.child_process import wait_until_ready
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


def binary(name: str) -> str:
    """Returns the path of an installed program. Skips the test if it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} (.ci/system-packages)")
    return found


@dataclass(frozen=True, slots=True)
class Starting:
    """Process that is starting; several can start at once."""

    process: subprocess.Popen[bytes]
    status_fd: int

    def facts(self, timeout_s: float = PATIENCE_S) -> dict[str, str]:
        """Waits until the process serves and returns its facts. Raises NotReady if it will not serve."""
        with ThreadPoolExecutor(1) as threads:  # the caller may run an event loop
            waiting = threads.submit(lambda: asyncio.run(asyncio.wait_for(wait_until_ready(self.status_fd), timeout_s)))
            return waiting.result()


def start(
    verb: str, *flags: str, token: str, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
) -> Starting:
    """Starts `moonserve verb flags` with a status pipe."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "moonserve", verb, *flags, "--status-fd", str(write_fd)],
        cwd=ROOT,
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": token, **(environment or {})},
        pass_fds=[write_fd],
        stderr=stderr,
    )
    os.close(write_fd)
    return Starting(process, read_fd)


def run_module(
    name: str, *arguments: str, timeout_s: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m name arguments` to its end, and returns its exit code and what it printed."""
    command, environ = [sys.executable, "-m", name, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)


@contextlib.contextmanager
def running(verb: str, *flags: str, token: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Yields a serving process and its facts. Stops it by SIGTERM, with exit code 0, unless the test ended it."""
    starting = start(verb, *flags, token=token)
    process = starting.process
    try:
        yield process, starting.facts()
        if process.poll() is None:
            stop(process)
    finally:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process by SIGTERM and checks that its exit code is 0."""
    process.terminate()
    assert process.wait(timeout=PATIENCE_S) == 0
