"""The contestants, their interface, and the timing of their steps.

The modules of the contestants are imported in their own processes only (`contestant_process.py`), because the peers'
environment lacks this project's packages. So this module imports the standard library only.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Protocol

from benchmarks.engine.shapes import Shape


@dataclass(slots=True)
class StepTimes:
    """Seconds of each step: wall time, and processor time of all threads together."""

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    tokens: int = 0  # produced by these steps
    waited_s: float = 0.0  # time in which a thread was ready but another program had its core


class StepTimer:
    """Times the steps of one turn. Between `StepTimer()`, each `step()` and `done()`, only steps may run."""

    def __init__(self) -> None:
        self._turn = StepTimes()
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

    def done(self) -> StepTimes:
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


NATIVE, TORCH, LAYERS = "moonserve native", "moonserve torch", "moonserve transformers"
INT8, INT4 = "moonserve int8", "moonserve int4"
TRANSFORMERS, VLLM, LLAMA_CPP = "transformers", "vLLM", "llama.cpp"
LLAMA_CPP_8, LLAMA_CPP_4 = "llama.cpp Q8_0", "llama.cpp Q4_0"
CONTESTANTS = (NATIVE, INT8, INT4, TORCH, LAYERS, TRANSFORMERS, VLLM, LLAMA_CPP, LLAMA_CPP_8, LLAMA_CPP_4)
_MODULES = {
    NATIVE: "benchmarks.engine.speed.moonserve",
    INT8: "benchmarks.engine.speed.moonserve",
    INT4: "benchmarks.engine.speed.moonserve",
    TORCH: "benchmarks.engine.speed.moonserve",
    LAYERS: "benchmarks.engine.speed.moonserve",
    TRANSFORMERS: "benchmarks.engine.speed.transformers",
    VLLM: "benchmarks.engine.speed.vllm",
    **dict.fromkeys((LLAMA_CPP, LLAMA_CPP_8, LLAMA_CPP_4), "benchmarks.engine.speed.llama_cpp"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestantConfig:
    """Configuration of a contestant."""

    name: str
    folder: str  # a model in Hugging Face format
    scratch: str  # files that are kept for the next run
    dtype: str
    cores: list[int]


class Contestant(Protocol):
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns the first `count` tokens after a prompt; they show that all contestants run the same model."""

    def prepare(self, shape: Shape) -> None:
        """Allocates and fills the KV cache for `shape`, and warms up."""

    def run(self, shape: Shape, steps: int) -> StepTimes:
        """Runs `steps` decode steps, or one prompt. Each step produces `shape.batch` tokens."""


def make(config: ContestantConfig) -> Contestant:
    """Imports the contestant's module and creates the contestant."""
    made: Contestant = import_module(_MODULES[config.name]).make(config)
    return made


def scratch_file(config: ContestantConfig, ending: str) -> Path:
    return Path(config.scratch) / f"{Path(config.folder).name}{ending}"
