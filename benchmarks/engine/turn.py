"""Timing of one contestant's turn, in wall and processor time. Standard library only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Turn:
    """Seconds of each step: wall time, and processor time of all threads together."""

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    tokens: int = 0  # produced by these steps
    waited_s: float = 0.0  # time in which a thread was ready but another program had its core


class Watch:
    """Times the steps of one turn. Between `Watch()`, each `step()` and `done()`, only steps may run."""

    def __init__(self) -> None:
        self._turn = Turn()
        self._waited = _waited_s()
        self._begin()

    def _begin(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def step(self, tokens: int) -> None:
        """Records a step that has just ended with `tokens` tokens, and starts timing the next one."""
        self._turn.wall_s.append(time.perf_counter() - self._wall)
        self._turn.processor_s.append(time.process_time() - self._processor)
        self._turn.tokens += tokens
        self._begin()

    def done(self) -> Turn:
        self._turn.waited_s = _waited_s() - self._waited
        return self._turn


def _waited_s() -> float:
    """Returns the waiting time of all threads of this process so far (schedstat: run, waiting, turns); 0 if unknown."""
    nanoseconds = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            nanoseconds += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread ended, or this kernel does not count
            continue
    return nanoseconds / 1e9
