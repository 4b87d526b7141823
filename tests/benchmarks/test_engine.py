"""Tests of the engine's benchmarks at a tiny size: each runs to its table, and compared results agree."""

import math
import os
from contextlib import ExitStack
from pathlib import Path

from benchmarks.engine.shapes import DEMO_FOLDER, Shape, prompt_tokens
from benchmarks.engine.speed.contest import ContestantProcess, measure_shape
from benchmarks.engine.speed.contestant import NATIVE, TORCH, TRANSFORMERS, ContestantConfig


def test_contestants_take_turns_in_processes_and_give_the_same_tokens(tmp_path: Path) -> None:
    names = (NATIVE, TORCH, TRANSFORMERS)
    wish = {"folder": str(DEMO_FOLDER), "scratch": str(tmp_path), "dtype": "float32"}
    with ExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))[:1]
        sides = {name: ContestantProcess(ContestantConfig(name=name, cores=cores, **wish)) for name in names}
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.wait_until_ready()
        tokens = [side.greedy(prompt_tokens(0, 40, 4096), 6) for side in sides.values()]
        assert len(tokens[0]) == 6
        assert tokens.count(tokens[0]) == len(tokens)
        for shape in (Shape(batch=2, context=40), Shape(prompt=70)):
            for figures in measure_shape(sides, shape, rounds=1, retakes=0).values():
                assert all(math.isfinite(value) and value >= 0 for value in figures.values())
