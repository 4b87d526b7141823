"""Compares decode and prefill of this engine with other engines and with the limit of memory bandwidth.

All contestants with one model and dtype run at the same time and take turns at one shape after another. Figures are
medians over the rounds; ratios compare figures of the same run. In float32, contestants with other tokens than the
first are marked. The limit ("floor") applies to memory: data in a cache may be faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.bandwidth import read_bytes_per_s
from benchmarks.engine.contest import Side, measure_shape
from benchmarks.engine.contestants import CONTESTANTS, Wish
from benchmarks.engine.floor import step_bytes
from benchmarks.engine.peers.environment import is_installed
from benchmarks.engine.shapes import DEMO_FOLDER, DTYPES, MODELS, SHAPES, Shape, prompt_tokens
from benchmarks.engine.speed_report import bars, speed_table

_GREEDY_PROMPT, _GREEDY_TOKENS = 64, 16
_LEAST_VOCABULARY = 4096
"""Smallest vocabulary of the models, so that the prompt is valid for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    models: Sequence[str]
    dtypes: Sequence[str]
    contestants: Sequence[str]
    shapes: Sequence[Shape]
    cores: Sequence[int]  # numbers of cores, measured one after the other
    rounds: int
    retakes: int  # of a turn that other programs disturbed
    scratch: Path  # models in the contestants' formats, kept for the next run


def run(options: Options) -> dict[str, Any]:
    """Returns seconds per number of cores, model, dtype, contestant and label of the shape, and the bars."""
    runs = []
    options.scratch.mkdir(parents=True, exist_ok=True)
    installed = [name for name in options.contestants if is_installed(name)]
    for count in options.cores:
        cores = sorted(os.sched_getaffinity(0))[:count]
        with _confined(cores):
            bandwidth = read_bytes_per_s(cores)
            for model in options.models:
                folder = model_folder(model, options.scratch)
                for dtype in options.dtypes:
                    floor = {
                        shape.label: step_bytes(folder, dtype, shape) / bandwidth
                        for shape in options.shapes
                        if shape.prompt is None
                    }
                    one = {"cores": count, "model": model, "dtype": dtype, "floor": floor}
                    wishes = [
                        Wish(
                            name=name,
                            folder=str(folder),
                            scratch=str(options.scratch),
                            dtype=dtype,
                            cores=cores,
                        )
                        for name in installed
                    ]
                    runs.append({**one, "bytes_per_s": bandwidth, **_measure(options, wishes)})
                    print(speed_table(runs[-1], options.contestants) + "\n", flush=True)
    return {"rounds": options.rounds, "runs": runs, "bars": bars(runs)}


def model_folder(name: str, scratch: Path) -> Path:
    """Returns the folder of model "demo" or "110M"; writes the latter if it is missing."""
    if name == "demo":
        return DEMO_FOLDER
    folder = scratch.absolute() / name
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.engine.random_llama", str(folder)]
        subprocess.run(command, check=True)
    return folder


@contextmanager
def _confined(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(options: Options, wishes: Sequence[Wish]) -> dict[str, Any]:
    """Returns figures (contestant → label → wall_s, processor_s, waited) and differing (names with other tokens)."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for wish in wishes:
            sides[wish.name] = Side(wish)
            stack.callback(sides[wish.name].close)
        for side in sides.values():
            side.wait_until_ready()
        differing = _differing(sides) if wishes and wishes[0].dtype == "float32" else []
        figures: dict[str, dict[str, Any]] = {name: {} for name in sides}
        for shape in options.shapes:
            found = measure_shape(sides, shape, options.rounds, options.retakes)
            for name, seconds in found.items():
                figures[name][shape.label] = seconds
    return {"figures": figures, "differing": differing}


def _differing(sides: Mapping[str, Side]) -> list[str]:
    prompt = prompt_tokens(0, _GREEDY_PROMPT, _LEAST_VOCABULARY)
    tokens = {name: side.greedy(prompt, _GREEDY_TOKENS) for name, side in sides.items()}
    first = next(iter(tokens.values()))
    return [name for name, own in tokens.items() if own != first]


def default_options() -> Options:
    return Options(
        models=MODELS,
        dtypes=DTYPES,
        contestants=CONTESTANTS,
        shapes=SHAPES,
        cores=(1, 2),
        rounds=5,
        retakes=2,
        scratch=Path("out/engine/models"),
    )
