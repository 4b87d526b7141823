"""Runs contestants as processes in turns; all but the current one are stopped (SIGSTOP).

A contestant's background threads would otherwise take the core and memory bandwidth from the measured one. A turn in
which another program had the core for long is repeated.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import Shape
from benchmarks.engine.speed.contestant import (
    LLAMA_CPP,
    LLAMA_CPP_4,
    LLAMA_CPP_8,
    VLLM,
    ContestantConfig,
    StepTimes,
)
from benchmarks.harness.measure import median

# Locates the peers' installation (`make .venv-peers/.installed`) and sets their processes' environment variables.

_ROOT = Path(__file__).parent.parent.parent.parent
_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_NEEDED = {
    VLLM: ("vllm",),
    **dict.fromkeys((LLAMA_CPP, LLAMA_CPP_8, LLAMA_CPP_4), ("llama_cpp", "gguf", "safetensors")),
}
# vLLM recommends on x86 (in a warning at start): Intel's OpenMP, which it brings along, and tcmalloc, if installed
# (Debian: libtcmalloc-minimal4).
_OPENMP = _PYTHON.parent.parent / "lib" / "libiomp5.so"
_TCMALLOC = "libtcmalloc_minimal.so.4"


def interpreter_of(contestant: str) -> Path:
    return _PYTHON if contestant in _NEEDED else Path(sys.executable)


def is_installed(contestant: str) -> bool:
    """True if the contestant's modules are installed; does not import them."""
    if contestant not in _NEEDED:
        return True
    if not _PYTHON.exists():
        return False
    looks = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    found = subprocess.run([_PYTHON, "-c", looks, *_NEEDED[contestant]], check=False, cwd="/")
    return found.returncode == 0


def environment_of(contestant: str, cores: Sequence[int]) -> Mapping[str, str]:
    if contestant not in _NEEDED:
        return os.environ
    own = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": str(len(cores))}
    if contestant == VLLM:
        own |= {
            "LD_PRELOAD": f"{_OPENMP}:{_TCMALLOC}" if _has(_TCMALLOC) else str(_OPENMP),
            "KMP_BLOCKTIME": "5",  # ms; vLLM sets it for its workers
            "KMP_TPAUSE": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, no messages
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "3",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
    return {**os.environ, **own}


def _has(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


_PATIENCE_S = 6.0
"""A shape with a longer warm-up step is measured in one round only, because its figure hardly varies."""
_SAMPLE_S = 0.3
_MOST_STEPS = 12
_DISTURBED = 0.03
"""Largest share of an undisturbed turn's wall time for which its threads waited for a core."""


class ContestantProcess:
    """Handle of one contestant's process."""

    def __init__(self, config: ContestantConfig) -> None:
        module = "benchmarks.engine.speed.contestant_process"
        self._process = subprocess.Popen(
            [interpreter_of(config.name), "-m", module, json.dumps(asdict(config))],
            env=environment_of(config.name, config.cores),
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

    def run(self, shape: Shape) -> StepTimes:
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

    def _run(self, shape: Shape, steps: int) -> StepTimes:
        turn = StepTimes(**self._ask({"shape": asdict(shape), "steps": steps}))
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


def measure_shape(
    sides: Mapping[str, ContestantProcess], shape: Shape, rounds: int, retakes: int
) -> dict[str, dict[str, float]]:
    """Returns per contestant the median wall and processor seconds of a step, and the largest share of waiting."""
    warm = {}
    for name, side in sides.items():
        print(f"{shape.label}: {name}", end="   \r", file=sys.stderr, flush=True)
        warm[name] = side.prepare(shape)
    turns: dict[str, list[StepTimes]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            if number == 0 or warm[name] < _PATIENCE_S:
                turns[name].append(undisturbed(side, shape, retakes))
    return {name: _figures(own) for name, own in turns.items()}


def undisturbed(side: ContestantProcess, shape: Shape, retakes: int) -> StepTimes:
    """Repeats a disturbed turn up to `retakes` times; returns the turn with the least waiting for a core."""
    best = side.run(shape)
    for _ in range(retakes):
        if _waited(best) <= _DISTURBED:
            break
        best = min(best, side.run(shape), key=_waited)
    return best


def _waited(turn: StepTimes) -> float:
    return turn.waited_s / sum(turn.wall_s)


def _figures(turns: Sequence[StepTimes]) -> dict[str, float]:
    return {
        "wall_s": median([median(turn.wall_s) for turn in turns]),
        "processor_s": median([median(turn.processor_s) for turn in turns]),
        "waited": max(_waited(turn) for turn in turns),
    }
