"""Runs the speed part: verifies every load once, then measures rounds in which all stores take turns at each load.

Compared measurements are close in time, so that noise affects all stores equally. A failed store becomes a row with the
reason and does not end the run. Owns the results.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.store.contestants import Contestant
from benchmarks.store.processes import Child, Group, python
from benchmarks.store.servers import PEERS
from benchmarks.store.workload import Load, as_json, describe
from benchmarks.transfer.pair import ContestantError, Placement
from benchmarks.transfer.side import Control
from benchmarks.turns import in_turns, tell

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


class Running:
    """A store's running servers and connected client. Every method may raise ContestantError."""

    def __init__(self, contestant: Contestant, folder: Path, placement: Placement) -> None:
        self._group = Group(folder, contestant.environment)
        self._connection, theirs = socket.socketpair()
        self._control = Control(self._connection)
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
            raise ContestantError(f"died: {self._child.last_words()}") from None
        if "error" in answer:
            raise ContestantError(answer["error"])
        return answer


def _client(
    contestant: Contestant,
    group: Group,
    facts: dict[str, Any],
    placement: Placement,
    control: socket.socket,
) -> Child:
    interpreter = PEERS / "python" if contestant.in_peers_environment else Path(sys.executable)
    told = [json.dumps(facts), json.dumps(contestant.options), str(control.fileno())]
    command = python("benchmarks.store.side", contestant.client, *told, interpreter=interpreter)
    cores = placement.cores("initiator")
    return group.start("client", command, cores=cores, pass_fds=[control.fileno()])


class Seat:
    """One store in the run: its processes, while they live, and its results."""

    def __init__(self, contestant: Contestant, folder: Path, placement: Placement) -> None:
        self.result = Result(contestant)
        self.modes: dict[Load, Sequence[str]] = {}
        self._folder = folder / contestant.name.replace(" ", "-")
        self._placement = placement
        self._running: Running | None = None
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

    def _started(self) -> Running:
        if self._running is None:
            if not self._starts_left:
                raise ContestantError("had to be killed too often")
            self._starts_left -= 1
            self._running = Running(self.result.contestant, self._folder, self._placement)
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()


@contextlib.contextmanager
def seated(contestants: Sequence[Contestant], folder: Path, placement: Placement) -> Iterator[list[Seat]]:
    seats = [Seat(contestant, folder, placement) for contestant in contestants]
    try:
        yield seats
    finally:
        for seat in seats:
            seat.close()


def verify(seats: Sequence[Seat], loads: Sequence[Load]) -> None:
    """Gets each store's modes for each load, then compares the moved bytes in each mode."""
    for load in loads:
        tell(f"verify {describe(load)}")
        for seat in seats:
            if seat.takes_part(load):
                seat.modes[load] = (seat.call("modes", load) or {"modes": ()})["modes"]
                for mode in seat.modes[load]:
                    _verify_one(seat, load, mode)


def _verify_one(seat: Seat, load: Load, mode: str) -> None:
    if not seat.takes_part(load):
        return
    answer = seat.call("verify", load, mode=mode)
    if answer and answer["differing"]:
        seat.failed(load, f"{answer['differing']} values are not what was put")


def measure(seats: Sequence[Seat], loads: Sequence[Load], *, rounds: int, min_s: float) -> None:
    for seat, load in in_turns(seats, loads, rounds):
        for mode in seat.modes.get(load, ()):
            _measure_one(seat, load, mode, min_s)


def _measure_one(seat: Seat, load: Load, mode: str, min_s: float) -> None:
    if not seat.takes_part(load):
        return
    answer = seat.call("run", load, mode=mode, min_s=min_s)
    if answer is not None:
        seat.result.samples.setdefault((load, mode), []).append(Sample(load, **answer))
