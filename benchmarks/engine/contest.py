"""Runs contestants as processes in turns; all but the current one are stopped (SIGSTOP).

A contestant's background threads would otherwise take the core and memory bandwidth from the measured one. A turn in
which another program had the core for long is repeated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.engine.contestants import Wish
from benchmarks.engine.peers.environment import environment, interpreter
from benchmarks.engine.shapes import Shape
from benchmarks.engine.turn import Turn
from benchmarks.measure import median

_PATIENCE_S = 6.0
"""A shape with a longer warm-up step is measured in one round only, because its figure hardly varies."""
_SAMPLE_S = 0.3
_MOST_STEPS = 12
_DISTURBED = 0.03
"""Largest share of an undisturbed turn's wall time for which its threads waited for a core."""


class Side:
    """Handle of one contestant's process."""

    def __init__(self, wish: Wish) -> None:
        self._process = subprocess.Popen(
            [interpreter(wish.name), "-m", "benchmarks.engine.side", json.dumps(asdict(wish))],
            env=environment(wish.name, wish.cores),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._steps: dict[str, int] = {}

    def wait_until_ready(self) -> None:
        self._answer()
        self._signal(signal.SIGSTOP)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        with self._turn():
            tokens: list[int] = self._ask({"greedy": list(prompt), "count": count})
        return tokens

    def prepare(self, shape: Shape) -> float:
        """Prepares `shape` and returns the seconds of a warm step."""
        with self._turn():
            self._ask({"shape": asdict(shape), "steps": 0})
            [seconds] = self._run(shape, 1).wall_s
        steps = max(1, min(_MOST_STEPS, int(_SAMPLE_S / seconds)))
        self._steps[shape.label] = 1 if shape.prompt is not None else steps
        return seconds

    def run(self, shape: Shape) -> Turn:
        with self._turn():
            return self._run(shape, self._steps[shape.label])

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _run(self, shape: Shape, steps: int) -> Turn:
        turn = Turn(**self._ask({"shape": asdict(shape), "steps": steps}))
        if turn.tokens != steps * shape.batch:
            raise RuntimeError(f"{turn.tokens} tokens of {steps} steps, {shape.label}")
        return turn

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended with status {self._process.wait()}")
        return json.loads(line)


def measure_shape(sides: Mapping[str, Side], shape: Shape, rounds: int, retakes: int) -> dict[str, dict[str, float]]:
    """Returns per contestant the median wall and processor seconds of a step, and the largest share of waiting."""
    warm = {}
    for name, side in sides.items():
        print(f"{shape.label}: {name}", end="   \r", file=sys.stderr, flush=True)
        warm[name] = side.prepare(shape)
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            if number == 0 or warm[name] < _PATIENCE_S:
                turns[name].append(undisturbed(side, shape, retakes))
    return {name: _figures(own) for name, own in turns.items()}


def undisturbed(side: Side, shape: Shape, retakes: int) -> Turn:
    """Repeats a disturbed turn up to `retakes` times; returns the turn with the least waiting for a core."""
    best = side.run(shape)
    for _ in range(retakes):
        if _waited(best) <= _DISTURBED:
            break
        best = min(best, side.run(shape), key=_waited)
    return best


def _waited(turn: Turn) -> float:
    return turn.waited_s / sum(turn.wall_s)


def _figures(turns: Sequence[Turn]) -> dict[str, float]:
    return {
        "wall_s": median([median(turn.wall_s) for turn in turns]),
        "processor_s": median([median(turn.processor_s) for turn in turns]),
        "waited": max(_waited(turn) for turn in turns),
    }
