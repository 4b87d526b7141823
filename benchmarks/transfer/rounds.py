"""Runs a benchmark: verifies every load once, then measures rounds in which all contestants take turns at each load.

Compared measurements are close in time, so that noise affects all contestants equally. Owns the results.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.transfer.contestant import Contestant
from benchmarks.transfer.pair import ContestantError, Pair, Placement, Sample
from benchmarks.transfer.workload import LATENCY, Load
from benchmarks.turns import in_turns, tell

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


class Seat:
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
def seated(
    contestants: Sequence[Contestant],
    pythons: Callable[[Contestant], Path],
    log_dir: Path,
    placement: Placement,
) -> Iterator[list[Seat]]:
    seats = []
    try:
        for contestant in contestants:
            python = pythons(contestant)
            seats.append(Seat(contestant, python, log_dir, placement))
            if not python.exists():
                seats[-1].result.absent = "not installed"
        yield seats
    finally:
        for seat in seats:
            seat.close()


def verify(seats: Sequence[Seat], loads: Sequence[Load]) -> None:
    """Chooses each contestant's modes for each load, then compares the moved bytes in each mode."""
    for load in loads:
        tell(f"verify {describe(load)}")
        for seat in seats:
            if seat.takes_part(load):
                seat.modes[load] = _best_modes(seat, load)
                for mode in seat.modes[load]:
                    if seat.contestant.verified and seat.takes_part(load):
                        seat.turn(Pair.verify, load, mode)


def _best_modes(seat: Seat, load: Load) -> Sequence[str]:
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


def measure(seats: Sequence[Seat], loads: Sequence[Load], *, rounds: int, min_s: float) -> None:
    for seat, load in in_turns(seats, loads, rounds):
        if seat.takes_part(load):
            _measure_one(seat, load, min_s)


def _measure_one(seat: Seat, load: Load, min_s: float) -> None:
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
