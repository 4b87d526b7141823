"""Runs the speed part: verifies every load once, then measures rounds in which all stores take turns at each load.

Compared measurements are close in time, so that noise affects all stores equally. A failed store becomes a row with the
reason and does not end the run. Owns the results.
"""

import contextlib
import json
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import ForeignLoad, interleaved, median, report_progress
from benchmarks.store.report import Bar, speed_bars
from benchmarks.store.servers import PEERS, ChildProcess, ProcessGroup, python_command
from benchmarks.store.speed.contestants import Contestant
from benchmarks.store.speed.workload import EXISTS, OPS, SIZES, Load, as_json, describe, loads
from benchmarks.transfer.contest import ContestantError, Placement
from benchmarks.transfer.contestant_process import ControlChannel

START_S = 90.0
ANSWER_S = 30.0
STARTS = 4
"""Most starts of a store, including restarts after a kill."""


@dataclass(frozen=True, slots=True)
class Sample:
    load: Load
    calls: int
    seconds: float
    p50_us: float
    p99_us: float

    @property
    def gb_s(self) -> float:
        return self.calls * self.load.call_bytes / self.seconds / 1e9

    @property
    def values_s(self) -> float:
        return self.calls * self.load.batch / self.seconds


@dataclass(slots=True, eq=False)
class Result:
    contestant: Contestant
    samples: dict[tuple[Load, str], list[Sample]] = field(default_factory=dict)
    """One sample per round, by load and mode."""
    errors: dict[Load, str] = field(default_factory=dict)
    absent: str | None = None
    """Reason why it does not take part, or no longer does."""


class RunningStore:
    """A store's running servers and connected client. Every method may raise ContestantError."""

    def __init__(self, contestant: Contestant, folder: Path, placement: Placement) -> None:
        self._group = ProcessGroup(folder, contestant.environment)
        self._connection, theirs = socket.socketpair()
        self._control = ControlChannel(self._connection)
        try:
            with theirs:  # only the client keeps its end, so that its death is noticed
                cores = placement.cores("target")
                facts = contestant.servers(self._group, cores, contestant.options)
                self._child = _client(contestant, self._group, facts, placement, theirs)
            self._answer(START_S)
        except BaseException:  # also on interruption: leaves no process behind
            self.kill()
            raise

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # a dead process is noticed by the missing answer
            self._control.send({"do": do, **arguments})
        return self._answer(ANSWER_S)

    def close(self) -> None:
        """Ends the processes in order, so that they clean up their resources."""
        with contextlib.suppress(ContestantError):
            self.call("close")
        self._group.close()
        self._connection.close()

    def kill(self) -> None:
        self._group.kill()
        self._connection.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            if not self._control.pending(timeout_s):
                raise ContestantError(f"no answer within {timeout_s:g} s")
            answer = self._control.receive()
        except (EOFError, ConnectionError):
            raise ContestantError(f"died: {self._child.last_log_line()}") from None
        if "error" in answer:
            raise ContestantError(answer["error"])
        return answer


def _client(
    contestant: Contestant,
    group: ProcessGroup,
    facts: dict[str, Any],
    placement: Placement,
    control: socket.socket,
) -> ChildProcess:
    interpreter = PEERS / "python" if contestant.in_peers_environment else Path(sys.executable)
    told = [json.dumps(facts), json.dumps(contestant.options), str(control.fileno())]
    command = python_command("benchmarks.store.speed.client_process", contestant.client, *told, interpreter=interpreter)
    cores = placement.cores("initiator")
    return group.start("client", command, cores=cores, pass_fds=[control.fileno()])


class Entrant:
    """One store in the run: its processes, while they live, and its results."""

    def __init__(self, contestant: Contestant, folder: Path, placement: Placement) -> None:
        self.result = Result(contestant)
        self.modes: dict[Load, Sequence[str]] = {}
        self._folder = folder / contestant.name.replace(" ", "-")
        self._placement = placement
        self._running: RunningStore | None = None
        self._starts_left = STARTS
        if contestant.in_peers_environment and not (PEERS / "python").exists():
            self.result.absent = "not installed"

    def takes_part(self, load: Load) -> bool:
        result = self.result
        return result.contestant.can(load) and result.absent is None and load not in result.errors

    def call(self, do: str, load: Load, **arguments: Any) -> dict[str, Any] | None:
        """Calls the client. Returns None on failure: the reason is in the result, and the load is not retried."""
        try:
            running = self._started()
        except ContestantError as error:
            self.result.absent = f"failed: {error}"
            return None
        try:
            return running.call(do, load=as_json(load), **arguments)
        except ContestantError as error:
            self.failed(load, str(error))
            return None

    def failed(self, load: Load, why: str) -> None:
        self.result.errors[load] = why
        print(f"  {self.result.contestant.name}, {describe(load)}: {why}", file=sys.stderr)
        if self._running is not None:
            self._running.kill()  # its state is unknown
            self._running = None

    def _started(self) -> RunningStore:
        if self._running is None:
            if not self._starts_left:
                raise ContestantError("had to be killed too often")
            self._starts_left -= 1
            self._running = RunningStore(self.result.contestant, self._folder, self._placement)
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()


@contextlib.contextmanager
def open_entrants(contestants: Sequence[Contestant], folder: Path, placement: Placement) -> Iterator[list[Entrant]]:
    seats = [Entrant(contestant, folder, placement) for contestant in contestants]
    try:
        yield seats
    finally:
        for seat in seats:
            seat.close()


def verify_all(seats: Sequence[Entrant], loads: Sequence[Load]) -> None:
    """Gets each store's modes for each load, then compares the moved bytes in each mode."""
    for load in loads:
        report_progress(f"verify {describe(load)}")
        for seat in seats:
            if seat.takes_part(load):
                seat.modes[load] = (seat.call("modes", load) or {"modes": ()})["modes"]
                for mode in seat.modes[load]:
                    _verify_one(seat, load, mode)


def _verify_one(seat: Entrant, load: Load, mode: str) -> None:
    if not seat.takes_part(load):
        return
    answer = seat.call("verify", load, mode=mode)
    if answer and answer["differing"]:
        seat.failed(load, f"{answer['differing']} values are not what was put")


def measure_rounds(seats: Sequence[Entrant], loads: Sequence[Load], *, rounds: int, min_s: float) -> None:
    for seat, load in interleaved(seats, loads, rounds):
        for mode in seat.modes.get(load, ()):
            _measure_one(seat, load, mode, min_s)


def _measure_one(seat: Entrant, load: Load, mode: str, min_s: float) -> None:
    if not seat.takes_part(load):
        return
    answer = seat.call("run", load, mode=mode, min_s=min_s)
    if answer is not None:
        seat.result.samples.setdefault((load, mode), []).append(Sample(load, **answer))


# Computes the figures of the speed part: medians over rounds, with the best mode of each store. Pure.


def figures_of(result: Result, sizes: Sequence[str]) -> dict[str, Any]:
    """Returns one store's part of the JSON."""
    return {
        "group": result.contestant.group,
        "absent": result.absent,
        "errors": {describe(load): error for load, error in result.errors.items()},
        "cells": {size: {op: cell for op in OPS if (cell := _cell(result, Load(op, *SIZES[size])))} for size in sizes},
        "exists": _cell(result, EXISTS),
    }


def _cell(result: Result, load: Load) -> dict[str, Any] | None:
    by_mode = {mode: samples for (of, mode), samples in result.samples.items() if of == load}
    if not by_mode or load in result.errors:
        return None
    mode = max(by_mode, key=lambda mode: median([sample.values_s for sample in by_mode[mode]]))
    return {"mode": mode, **_summary(by_mode[mode])}


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "gb_s": median([sample.gb_s for sample in samples]),
        "values_s": median([sample.values_s for sample in samples]),
        "p50_us": median([sample.p50_us for sample in samples]),
        "p99_us": median([sample.p99_us for sample in samples]),
        "values_s_rounds": [round(sample.values_s, 2) for sample in samples],
        "p50_us_rounds": [round(sample.p50_us, 2) for sample in samples],
    }


# Part 1: compares put, get and exists with other stores and a plain copy.


def measure_speed(
    contestants: Sequence[Contestant],
    sizes: Sequence[str],
    *,
    rounds: int,
    min_s: float,
    placement: Placement,
) -> tuple[dict[str, Any], list[Bar]]:
    quiet = ForeignLoad()
    work = loads(sizes)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_entrants(contestants, Path(folder), placement) as seated,
    ):
        verify_all(seated, work)
        measure_rounds(seated, work, rounds=rounds, min_s=min_s)
        results = {seat.result.contestant.name: figures_of(seat.result, sizes) for seat in seated}
    part = {
        "sizes": list(sizes),
        "rounds": rounds,
        "placement": placement,
        "others_cores": quiet.others_cores(),
        "results": results,
    }
    return part, speed_bars(results, sizes)
