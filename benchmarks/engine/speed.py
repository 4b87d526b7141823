"""Decode and prefill of our engine beside `transformers` generate, and beside what memory allows.

All contestants with one model and dtype are alive at the same time and are asked in turn, one shape after another;
figures are medians over the rounds, ratios are of figures of the same run. On one core time is what the processor
spent, not what the clock on the wall said. The floor is of memory: what lies in a cache may be faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.bandwidth import read_bytes_per_s
from benchmarks.engine.shapes import SHAPES, Shape, model_folder, step_bytes
from benchmarks.measure import median, table

CONTESTANTS = ("moonserve native", "moonserve torch", "transformers")
MODELS = ("demo", "110M")
DTYPES = ("bfloat16", "float32")
_NATIVE, _PEER = "moonserve native", "transformers"
_PATIENCE_S = 6.0
"""A shape that takes longer than this in one warm-up step is measured once: its figure hardly varies."""
_SAMPLE_S = 0.2
_MOST_STEPS = 20

Bar = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    models: Sequence[str]
    dtypes: Sequence[str]
    contestants: Sequence[str]
    shapes: Sequence[Shape]
    cores: Sequence[int]  # how many cores, each in turn
    rounds: int


class Side:
    """A contestant's process."""

    def __init__(self, name: str, folder: Path, dtype: str, cores: Sequence[int]) -> None:
        wish = {"name": name, "folder": str(folder), "dtype": dtype, "cores": list(cores)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.side", json.dumps(wish)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._steps: dict[str, int] = {}

    def wait_until_ready(self) -> None:
        self._answer()

    def prepare(self, shape: Shape) -> float:
        """Seconds of a warm step."""
        self._ask(shape, 0)
        [seconds] = self._ask(shape, 1)
        steps = max(1, min(_MOST_STEPS, int(_SAMPLE_S / seconds)))
        self._steps[shape.label] = 1 if shape.prompt is not None else steps
        return seconds

    def run(self, shape: Shape) -> list[float]:
        return self._ask(shape, self._steps[shape.label])

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()

    def _ask(self, shape: Shape, steps: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"shape": asdict(shape), "steps": steps}) + "\n")
        self._process.stdin.flush()
        times: list[float] = self._answer()
        return times

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contestant ended with status {self._process.wait()}")
        return json.loads(line)


def run(options: Options) -> dict[str, Any]:
    """Figures as seconds: per number of cores, model, dtype and contestant, by the shape's label."""
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        for count in options.cores:
            cores = sorted(os.sched_getaffinity(0))[:count]
            with _confined(cores):
                bandwidth = read_bytes_per_s()
                for model in options.models:
                    folder = model_folder(model, Path(temporary))
                    for dtype in options.dtypes:
                        figures = _measure(options, folder, dtype, cores)
                        floor = {
                            shape.label: step_bytes(folder, dtype, shape) / bandwidth
                            for shape in options.shapes
                            if shape.prompt is None
                        }
                        one = {"cores": count, "model": model, "dtype": dtype, "floor": floor}
                        runs.append({**one, "bytes_per_s": bandwidth, "seconds": figures})
                        print(_table(runs[-1], options.shapes) + "\n", flush=True)
    return {"rounds": options.rounds, "runs": runs, "bars": bars(runs)}


@contextmanager
def _confined(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(
    options: Options, folder: Path, dtype: str, cores: Sequence[int]
) -> dict[str, dict[str, float]]:
    with ExitStack() as stack:
        sides = {name: Side(name, folder, dtype, cores) for name in options.contestants}
        for side in sides.values():
            stack.callback(side.close)
        for side in sides.values():
            side.wait_until_ready()
        figures: dict[str, dict[str, float]] = {name: {} for name in sides}
        for shape in options.shapes:
            for name, seconds in _measure_shape(sides, shape, options.rounds).items():
                figures[name][shape.label] = seconds
    return figures


def _measure_shape(sides: Mapping[str, Side], shape: Shape, rounds: int) -> dict[str, float]:
    warm = {name: side.prepare(shape) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            if number == 0 or warm[name] < _PATIENCE_S:
                times[name].append(median(side.run(shape)))
    return {name: median(own) for name, own in times.items()}


# -- what it says


def _table(run: Mapping[str, Any], shapes: Sequence[Shape]) -> str:
    decodes = [shape for shape in shapes if shape.prompt is None]
    prefills = [shape for shape in shapes if shape.prompt is not None]
    rows = []
    for name, seconds in run["seconds"].items():
        cells = [f"{seconds[shape.label] * 1e3:.2f}" for shape in decodes]
        cells += [
            f"{shape.prompt / seconds[shape.label]:,.0f}" for shape in prefills if shape.prompt
        ]
        rows.append([name, *cells])
    floor = [f"{run['floor'][shape.label] * 1e3:.2f}" for shape in decodes]
    rows.append([f"floor at {run['bytes_per_s'] / 1e9:.0f} GB/s", *floor, *("–" for _ in prefills)])
    clock = "one core, its time" if run["cores"] == 1 else f"{run['cores']} cores, wall clock"
    title = f"{run['model']}, {run['dtype']}, {clock}: ms per step, tokens/s"
    return table([title, *(shape.label for shape in shapes)], rows)


def bars(runs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """What is claimed of one core and bfloat16; `met` is None where it was not measured."""
    found = {
        run["model"]: run["seconds"]
        for run in runs
        if run["cores"] == 1 and run["dtype"] == "bfloat16"
    }
    small = found.get("110M", {}).get(_NATIVE, {})
    demo = found.get("demo", {})
    prefill, label = small.get("prefill 2048"), "B1 C512"
    own, peer = (demo.get(name, {}).get(label) for name in (_NATIVE, _PEER))
    return [
        _bar("110M decode, B1 C512, ms", _scaled(small.get(label)), "≤", 11.0),
        _bar("110M decode, B8 C512, ms", _scaled(small.get("B8 C512")), "≤", 19.0),
        _bar(
            "110M prefill of 2,048, tokens/s",
            None if prefill is None else 2048 / prefill,
            "≥",
            850.0,
        ),
        _bar("demo decode, times transformers", peer / own if own and peer else None, "≥", 10.0),
    ]


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _bar(claim: str, measured: float | None, sign: str, limit: float) -> Bar:
    met = None
    if measured is not None:
        met = measured <= limit if sign == "≤" else measured >= limit
    return {"claim": claim, "measured": measured, "bar": f"{sign} {limit:g}", "met": met}


def default_options() -> Options:
    return Options(
        models=MODELS,
        dtypes=DTYPES,
        contestants=CONTESTANTS,
        shapes=SHAPES,
        cores=(1, 2),
        rounds=5,
    )
