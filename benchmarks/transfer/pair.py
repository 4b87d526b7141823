"""A contestant's two processes, seen from the driver: start, ask, pause, kill.

Its rules: every answer has a time limit, and a pair that misses it is killed, by process id; a pair is
stopped (SIGSTOP) while it is not its turn, so that nobody's idle threads cost the others anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.side import Control
from benchmarks.transfer.workload import Load, as_json

START_S = 90.0
ANSWER_S = 30.0
CPUCLOCK_SCHED = 2
"""Linux's clock id of another process is made of its id and this (`clock_getcpuclockid`)."""


class ContestantError(Exception):
    """The contestant said no, did not answer in time, died, or moved other bytes than it should."""


@dataclass(frozen=True, slots=True)
class Sample:
    nbytes: int
    seconds: float
    cpu_s: float
    """Of both processes."""

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


class Placement(StrEnum):
    """APART: each side has half of the cores to itself. FREE: the kernel decides.

    Where the two ends share a core or not is worth a factor of two, and the kernel's choice is a
    lottery, so APART makes figures that can be compared.
    """

    APART = "apart"
    FREE = "free"

    def cores(self, role: str) -> set[int]:
        cores = sorted(os.sched_getaffinity(0))
        if self is Placement.FREE or len(cores) < 2:
            return set(cores)
        half = len(cores) // 2
        return set(cores[:half] if role == "initiator" else cores[half:])


def settled(command: Sequence[str], cores: set[int]) -> list[str]:
    """The command on its cores, and never outliving the thread that starts it.

    By util-linux, not between fork and exec: the copy of a process that speaks gRPC starts gRPC's threads, and
    `subprocess` closes their descriptors under them (one copy in thirty dies of it).
    """
    placed = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
    return ["setpriv", "--pdeathsig", "KILL", *placed, *command]


class SideProcess:
    def __init__(self, contestant: Contestant, role: str, python: Path, log: Path, placement: Placement) -> None:
        self._log = log
        ours, theirs = socket.socketpair()
        module, _, prefix = contestant.module.partition(":")
        arguments = ["-m", "benchmarks.transfer.side", role, module, prefix]
        arguments += [json.dumps(contestant.options), str(theirs.fileno())]
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                settled([str(python), *arguments], placement.cores(role)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=contestant.process_environment(),
            )
        self._connection, self._control = ours, Control(ours)
        self._cpu_clock = (~self._process.pid << 3) | CPUCLOCK_SCHED

    def ask(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # who has died does not answer either
            self._control.send(message)

    def answer(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Raises ContestantError."""
        timeout_s = timeout_s or ANSWER_S
        try:
            if not self._control.pending(timeout_s):
                raise ContestantError(f"no answer within {timeout_s:g} s")
            answer = self._control.receive()
        except (EOFError, ConnectionError):
            raise ContestantError(f"died: {self._last_words()}") from None
        if "error" in answer:
            raise ContestantError(answer["error"])
        return answer

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.ask({"do": do, **arguments})
        return self.answer()

    def cpu_s(self) -> float:
        return time.clock_gettime(self._cpu_clock)

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {self._process.wait()}"


class Pair:
    """Both sides of one contestant, connected. Raises ContestantError from every method."""

    def __init__(self, contestant: Contestant, python: Path, log_dir: Path, placement: Placement) -> None:
        self.contestant = contestant
        stem = contestant.name.replace(" ", "-")
        self._sides: list[SideProcess] = []
        try:
            for role in ("target", "initiator"):
                log = log_dir / f"{stem}-{role}.log"
                self._sides.append(SideProcess(contestant, role, python, log, placement))
            hellos = [side.answer(START_S)["hello"] for side in self._sides]
            self._both("connect", [{"other": hello} for hello in reversed(hellos)])
        except BaseException:  # interrupted too: no process is left behind
            self.kill()
            raise
        self._target, self._initiator = self._sides
        self.pause()

    def pause(self) -> None:
        for side in self._sides:
            side.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        for side in self._sides:
            side.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def verify(self, load: Load, mode: str) -> None:
        """One sweep, every byte of it compared."""
        ends = [self._target, self._initiator]
        source, destination = ends if load.op == "read" else reversed(ends)
        source.call("fill")
        destination.call("blank")
        with self._working(load, mode):
            self._initiator.call("run", min_s=1e-9)
        differing = destination.call("compare", load=as_json(load))["differing"]
        if differing:
            raise ContestantError(f"{differing} blocks arrived with other bytes")

    def measure(self, load: Load, mode: str, min_s: float) -> Sample:
        with self._working(load, mode):
            before = [side.cpu_s() for side in self._sides]
            answer = self._initiator.call("run", min_s=min_s)
            used = sum(side.cpu_s() - b for side, b in zip(self._sides, before, strict=True))
        return Sample(answer["bytes"], answer["seconds"], answer.get("cpu_s", used))

    def latencies(self, load: Load, mode: str) -> list[float]:
        with self._working(load, mode):
            took: list[float] = self._initiator.call("latencies")["latencies"]
        return took

    def close(self) -> None:
        """In peace, so that what the sides have started ends with them."""
        with contextlib.suppress(ContestantError), self.turn():
            self._both("close", [{}, {}])
        self.kill()

    def kill(self) -> None:
        for side in self._sides:
            side.end()

    @contextlib.contextmanager
    def _working(self, load: Load, mode: str) -> Iterator[None]:
        self._target.call("serve", load=as_json(load), mode=mode)
        self._initiator.call("prepare", load=as_json(load), mode=mode)
        yield  # after an error the pair is killed: nothing to tidy up
        self._initiator.call("done")
        self._target.call("stop")

    def _both(self, do: str, arguments: list[dict[str, Any]]) -> None:
        for side, each in zip(self._sides, arguments, strict=True):
            side.ask({"do": do, **each})
        for side in self._sides:
            side.answer(START_S)
