"""Processes of this project that tests start one by one, found by their ready report. Whole clusters: `tests.e2e`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from protocol.status import until_ready
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Starting:
    """A process on its way: several start at once."""

    process: subprocess.Popen[bytes]
    status_fd: int

    def facts(self) -> dict[str, str]:
        """Once it serves. Raises NotReady when it will not."""
        with ThreadPoolExecutor(1) as threads:  # whoever asks may run an event loop
            waiting = threads.submit(lambda: asyncio.run(asyncio.wait_for(until_ready(self.status_fd), PATIENCE_S)))
            return waiting.result()


def start(
    module: str, *flags: str, token: str, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
) -> Starting:
    """`python -m module flags`, with a status pipe."""
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags, "--status-fd", str(write_fd)],
        cwd=ROOT,
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": token, **(environment or {})},
        pass_fds=[write_fd],
        stderr=stderr,
    )
    os.close(write_fd)
    return Starting(process, read_fd)


@contextlib.contextmanager
def running(module: str, *flags: str, token: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A process that serves, and its facts; ended by SIGTERM, with exit code 0, unless the test ended it."""
    starting = start(module, *flags, token=token)
    process = starting.process
    try:
        yield process, starting.facts()
        if process.poll() is None:
            stop(process)
    finally:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    """By SIGTERM, with exit code 0."""
    process.terminate()
    assert process.wait(timeout=PATIENCE_S) == 0
