"""Runs contestants of two processes each: verifies every load once, then measures rounds in which all take turns.

The rules: every answer has a timeout, and a pair that misses it is killed by process id. A pair is stopped (SIGSTOP)
outside its turn, so that idle threads do not disturb other contestants.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.measure import interleaved, report_progress
from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.contestant_process import ControlChannel
from benchmarks.transfer.workload import LATENCY, Load, as_json

START_S = 90.0
ANSWER_S = 30.0
CPUCLOCK_SCHED = 2
"""Linux forms the clock id of another process from its pid and this constant (`clock_getcpuclockid`)."""


class ContestantError(Exception):
    """A contestant reported an error, missed a timeout, died, or moved wrong bytes."""


@dataclass(frozen=True, slots=True)
class Sample:
    nbytes: int
    seconds: float
    cpu_s: float
    """Processor time of both processes."""

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


class Placement(StrEnum):
    """Assignment of cores. APART: each side has its own half of the cores. FREE: the kernel decides.

    It makes a factor of two whether both ends share a core, and the kernel's choice is random. So only APART gives
    comparable figures.
    """

    APART = "apart"
    FREE = "free"

    def cores(self, role: str) -> set[int]:
        cores = sorted(os.sched_getaffinity(0))
        if self is Placement.FREE or len(cores) < 2:
            return set(cores)
        half = len(cores) // 2
        return set(cores[:half] if role == "initiator" else cores[half:])


def pinned_command(command: Sequence[str], cores: set[int]) -> list[str]:
    """Wraps a command so that it runs on `cores` and is killed when the thread that starts it ends.

    Uses util-linux rather than code between fork and exec: the fork of a process with gRPC starts gRPC's threads, and
    `subprocess` then closes their descriptors (one fork in thirty dies of it).
    """
    placed = ["taskset", "--cpu-list", ",".join(map(str, sorted(cores)))]
    return ["setpriv", "--pdeathsig", "KILL", *placed, *command]


class ContestantProcess:
    def __init__(self, contestant: Contestant, role: str, python: Path, log: Path, placement: Placement) -> None:
        self._log = log
        ours, theirs = socket.socketpair()
        module, _, prefix = contestant.module.partition(":")
        arguments = ["-m", "benchmarks.transfer.contestant_process", role, module, prefix]
        arguments += [json.dumps(contestant.options), str(theirs.fileno())]
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                pinned_command([str(python), *arguments], placement.cores(role)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=contestant.process_environment(),
            )
        self._connection, self._control = ours, ControlChannel(ours)
        self._cpu_clock = (~self._process.pid << 3) | CPUCLOCK_SCHED

    def ask(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a dead process is noticed by the missing answer
            self._control.send(message)

    def answer(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Returns the next answer. Raises ContestantError on an error, a timeout or a dead process."""
        timeout_s = timeout_s or ANSWER_S
        try:
            if not self._control.pending(timeout_s):
                raise ContestantError(f"no answer within {timeout_s:g} s")
            answer = self._control.receive()
        except (EOFError, ConnectionError):
            raise ContestantError(f"died: {self._last_log_line()}") from None
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

    def _last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {self._process.wait()}"


class Pair:
    """Both connected sides of one contestant. Every method may raise ContestantError."""

    def __init__(self, contestant: Contestant, python: Path, log_dir: Path, placement: Placement) -> None:
        self.contestant = contestant
        stem = contestant.name.replace(" ", "-")
        self._sides: list[ContestantProcess] = []
        try:
            for role in ("target", "initiator"):
                log = log_dir / f"{stem}-{role}.log"
                self._sides.append(ContestantProcess(contestant, role, python, log, placement))
            hellos = [side.answer(START_S)["hello"] for side in self._sides]
            self._both("connect", [{"other": hello} for hello in reversed(hellos)])
        except BaseException:  # also on interruption: leaves no process behind
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
        """Runs one sweep and compares every byte."""
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
        """Ends both sides in order, so that they can end processes of their own."""
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
        yield  # after an error the pair is killed, so no clean-up
        self._initiator.call("done")
        self._target.call("stop")

    def _both(self, do: str, arguments: list[dict[str, Any]]) -> None:
        for side, each in zip(self._sides, arguments, strict=True):
            side.ask({"do": do, **each})
        for side in self._sides:
            side.answer(START_S)


# Compared measurements are close in time, so that noise affects all contestants equally.

MODES_KEPT = 3
CALIBRATION_S = 0.04
STARTS = 6
"""Most starts of a pair, including restarts after a kill."""

Outcome = TypeVar("Outcome")
Step = Callable[[Pair, Load, str], Outcome]
Key = tuple[Load, str]
"""(load, mode)."""


@dataclass(slots=True, eq=False)
class Result:
    contestant: Contestant
    samples: dict[Key, list[Sample]] = field(default_factory=dict)
    latencies: dict[str, list[list[float]]] = field(default_factory=dict)
    """One list of seconds per round, by mode."""
    errors: dict[Load, str] = field(default_factory=dict)
    absent: str | None = None
    """Reason why it does not take part, or no longer does."""


class Entrant:
    """One contestant in the run: its pair, while it lives, and its results."""

    def __init__(self, contestant: Contestant, python: Path, log_dir: Path, placement: Placement) -> None:
        self.result = Result(contestant)
        self.modes: dict[Load, Sequence[str]] = {}
        self._start = partial(Pair, contestant, python, log_dir, placement)
        self._pair: Pair | None = None
        self._starts_left = STARTS

    @property
    def contestant(self) -> Contestant:
        return self.result.contestant

    def takes_part(self, load: Load) -> bool:
        result = self.result
        able = self.contestant.can(load) and (load != LATENCY or self.contestant.latency)
        return able and result.absent is None and load not in result.errors

    def turn(self, step: Step[Outcome], load: Load, mode: str) -> Outcome | None:
        """Runs a step. Returns None on failure: the reason is in the result, and the load is not retried."""
        try:
            pair = self._living_pair()
        except ContestantError as error:
            self.result.absent = f"failed: {error}"
            return None
        try:
            with pair.turn():
                return step(pair, load, mode)
        except ContestantError as error:
            self.result.errors[load] = str(error)
            print(f"  {self.contestant.name}, {describe(load)}: {error}", file=sys.stderr)
            pair.kill()  # its state is unknown
            self._pair = None
            return None

    def _living_pair(self) -> Pair:
        if self._pair is None:
            if not self._starts_left:
                raise ContestantError("had to be killed too often")
            self._starts_left -= 1
            self._pair = self._start()
        return self._pair

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()


@contextlib.contextmanager
def open_entrants(
    contestants: Sequence[Contestant],
    pythons: Callable[[Contestant], Path],
    log_dir: Path,
    placement: Placement,
) -> Iterator[list[Entrant]]:
    seats = []
    try:
        for contestant in contestants:
            python = pythons(contestant)
            seats.append(Entrant(contestant, python, log_dir, placement))
            if not python.exists():
                seats[-1].result.absent = "not installed"
        yield seats
    finally:
        for seat in seats:
            seat.close()


def verify(seats: Sequence[Entrant], loads: Sequence[Load]) -> None:
    """Chooses each contestant's modes for each load, then compares the moved bytes in each mode."""
    for load in loads:
        report_progress(f"verify {describe(load)}")
        for seat in seats:
            if seat.takes_part(load):
                seat.modes[load] = _best_modes(seat, load)
                for mode in seat.modes[load]:
                    if seat.contestant.verified and seat.takes_part(load):
                        seat.turn(Pair.verify, load, mode)


def _best_modes(seat: Entrant, load: Load) -> Sequence[str]:
    modes = seat.contestant.modes
    if len(modes) <= MODES_KEPT:
        return modes
    speed = dict.fromkeys(modes, 0.0)
    for mode in modes:
        if seat.takes_part(load):
            speed[mode] = seat.turn(_speed, load, mode) or 0.0
    return sorted(modes, key=lambda mode: -speed[mode])[:MODES_KEPT]


def _speed(pair: Pair, load: Load, mode: str) -> float:
    if load == LATENCY:
        took = pair.latencies(load, mode)
        return 1 / sorted(took)[len(took) // 2]
    return pair.measure(load, mode, CALIBRATION_S).gb_s


def measure(seats: Sequence[Entrant], loads: Sequence[Load], *, rounds: int, min_s: float) -> None:
    for seat, load in interleaved(seats, loads, rounds):
        if seat.takes_part(load):
            _measure_one(seat, load, min_s)


def _measure_one(seat: Entrant, load: Load, min_s: float) -> None:
    for mode in seat.modes[load]:
        if not seat.takes_part(load):
            return
        if load == LATENCY:
            took = seat.turn(Pair.latencies, load, mode)
            if took is not None:
                seat.result.latencies.setdefault(mode, []).append(took)
        else:
            sample = seat.turn(partial(Pair.measure, min_s=min_s), load, mode)
            if sample is not None:
                seat.result.samples.setdefault((load, mode), []).append(sample)


def describe(load: Load) -> str:
    times = f"{load.blocks}×" if load.blocks > 1 else ""
    return f"{load.op} {times}{load.block_bytes >> 10} KiB" + (" latency" if load == LATENCY else "")
