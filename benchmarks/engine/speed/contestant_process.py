"""Process of one contestant with one model, which answers each line of JSON with a line of JSON.

A separate process isolates the contestant's threads, memory and compiled code, and lets contestants take turns. It runs
in this project's environment or in the peers'. A contestant's output goes to stderr. It is killed when its parent ends.
"""

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.engine.shapes import Shape
from benchmarks.engine.speed.contestant import Contestant, ContestantConfig, make

_PR_SET_PDEATHSIG = 1  # prctl(2)
_WARM_STEPS = 2  # at the start of a turn, because others have used the caches


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.platform == "linux":  # a process stopped between turns would outlive its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config = ContestantConfig(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, config.cores)  # before torch counts the cores
    contestant = make(config)
    answers.write(json.dumps("ready") + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(contestant, json.loads(line))) + "\n")
        answers.flush()


def _answer(contestant: Contestant, asked: dict[str, Any]) -> Any:
    if "greedy" in asked:
        return contestant.greedy(asked["greedy"], asked["count"])
    shape = Shape(**asked["shape"])
    if asked["steps"] == 0:
        return contestant.prepare(shape)
    if shape.prompt is None:
        contestant.run(shape, _WARM_STEPS)
    return asdict(contestant.run(shape, asked["steps"]))


if __name__ == "__main__":
    main()
