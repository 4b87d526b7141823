"""The contestants: this engine with either set of kernels, `transformers` generate, vLLM and llama.cpp.

Each runs in its own process (`side.py`), and its module is imported only there, because the peers' environment lacks
this project's packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from benchmarks.engine.shapes import Shape
from benchmarks.engine.turn import Turn

NATIVE, TORCH = "moonserve native", "moonserve torch"
TRANSFORMERS, VLLM, LLAMA_CPP = "transformers", "vLLM", "llama.cpp"
CONTESTANTS = (NATIVE, TORCH, TRANSFORMERS, VLLM, LLAMA_CPP)
_MODULES = {
    NATIVE: "benchmarks.engine.ours",
    TORCH: "benchmarks.engine.ours",
    TRANSFORMERS: "benchmarks.engine.peers.transformers_peer",
    VLLM: "benchmarks.engine.peers.vllm_peer",
    LLAMA_CPP: "benchmarks.engine.peers.llama_peer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
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

    def run(self, shape: Shape, steps: int) -> Turn:
        """Runs `steps` decode steps, or one prompt. Each step produces `shape.batch` tokens."""


def make(wish: Wish) -> Contestant:
    """Imports the contestant's module and creates the contestant."""
    made: Contestant = import_module(_MODULES[wish.name]).make(wish)
    return made


def scratch_file(wish: Wish, ending: str) -> Path:
    return Path(wish.scratch) / f"{Path(wish.folder).name}{ending}"
