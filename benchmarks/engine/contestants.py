"""Who is measured: our engine with either set of kernels, `transformers` generate, vLLM and llama.cpp.

One per process (`side.py`). Each has its file, imported only in its own process, since peers live in an environment
without ours.
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
    """What a contestant is to be."""

    name: str
    folder: str  # a model as Hugging Face saves it
    scratch: str  # where files may be left for the next time
    dtype: str
    cores: list[int]


class Contestant(Protocol):
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first tokens behind a prompt: shows that all run the same model."""

    def prepare(self, shape: Shape) -> None:
        """Makes room and KV for it, and warms up."""

    def run(self, shape: Shape, steps: int) -> Turn:
        """`steps` decode steps, or one prompt; each step gives `shape.batch` tokens."""


def make(wish: Wish) -> Contestant:
    """`make` of its module."""
    made: Contestant = import_module(_MODULES[wish.name]).make(wish)
    return made


def scratch_file(wish: Wish, ending: str) -> Path:
    return Path(wish.scratch) / f"{Path(wish.folder).name}{ending}"
