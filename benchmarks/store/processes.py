"""Starts the processes of one contestant, waits until they are ready, and ends them.

Its rules: every process is ended by its id and never outlives the driver. Every wait has a timeout. No process is
stopped between turns, because stores' processes exchange heartbeats; all measured ones are idle without requests (less
than 1 % of a core).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.transfer.pair import ContestantError, settled
from protocol.status import NotReady, until_ready

READY_S = 60.0
STOP_S = 10.0
POLL_S = 0.01


class Child:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def require_alive(self) -> None:
        """Raises ContestantError with the last log line if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise ContestantError(f"died: {self.last_words() or f'exit code {code}'}")

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def stop(self, timeout_s: float) -> float:
        """Ends the process by SIGTERM; returns the seconds taken. Raises ContestantError on timeout."""
        begin = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ContestantError(f"did not end within {timeout_s:g} s") from None
        return time.monotonic() - begin

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Group:
    """Processes with a common folder for their logs, ended together."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        cores: set[int],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                settled(command, cores),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env={**self._environment, **(environment or {})},
            )
        self._children.append(Child(process, log))
        return self._children[-1]

    def close(self) -> None:
        """Sends SIGTERM to all processes, and kills those that do not end in time."""
        for child in self._children:
            child.process.terminate()
        give_up_at = time.monotonic() + STOP_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, give_up_at - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        self._children = []


def start_reporting(
    start: Callable[[Sequence[str], Sequence[int]], Child], command: Sequence[str]
) -> tuple[Child, int]:
    """Starts a process whose last argument is a descriptor for reports; returns it and the descriptor to read from."""
    read_fd, write_fd = os.pipe()
    try:
        return start([*command, str(write_fd)], [write_fd]), read_fd
    finally:
        os.close(write_fd)


def ready(child: Child, reports: int, timeout_s: float = READY_S) -> dict[str, str]:
    """Waits until a process serves; returns the facts it reports. Closes `reports`. Raises ContestantError."""
    try:
        return asyncio.run(asyncio.wait_for(until_ready(reports), timeout_s))
    except NotReady as error:
        raise ContestantError(f"{error}: {child.last_words()}") from error
    except TimeoutError as error:
        raise ContestantError(f"not ready within {timeout_s:g} s") from error


def until_listening(child: Child, port: int, timeout_s: float = READY_S) -> None:
    """Waits until a server without reports listens. Raises ContestantError."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        child.require_alive()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(POLL_S)
    raise ContestantError(f"does not listen within {timeout_s:g} s")


def python(module: str, *arguments: str, interpreter: Path = Path(sys.executable)) -> list[str]:
    return [str(interpreter), "-m", module, *arguments]


def all_cores() -> set[int]:
    return set(os.sched_getaffinity(0))
