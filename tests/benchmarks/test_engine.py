"""Tests of the engine's benchmarks at a tiny size: each runs to its table, and compared results agree."""

import math
import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.engine import attention
from benchmarks.engine.lookahead.__main__ import POLICIES, Load, as_table, dominates, replay, verdict
from benchmarks.engine.lookahead.requests import SYNTHETIC, synthetic_requests
from benchmarks.engine.shapes import DEMO_FOLDER, Shape, prompt_tokens
from benchmarks.engine.speed.contest import ContestantProcess, measure_shape
from benchmarks.engine.speed.contestant import NATIVE, TORCH, TRANSFORMERS, ContestantConfig


def test_attention_is_measured_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a small pool and few matrix rows, and stubs the memory bandwidth: full sizes take 0.5 GB and seconds."""
    monkeypatch.setattr(attention, "_POOL_BYTES", 1 << 20)
    monkeypatch.setattr(attention, "_GEMM_ROWS", 32)
    monkeypatch.setattr(attention, "read_bytes_per_s", lambda: 1e10)
    works = [attention.decode(2, 40), attention.prompts("two", (0, 9), (20, 40))]
    result = attention.run(works, ["bfloat16"], rounds=1, threads=1)
    for row in result["rows"]:
        assert min(row["native_ms"], row["torch_ms"], row["floor_ms"]) > 0
        assert f"| {row['work']} | bfloat16 |" in attention.report(result)


def test_allocators_are_replayed_and_lookahead_dominates() -> None:
    """Lookahead preempts less than on-demand and has more throughput than worst-case allocation, in virtual time."""
    load = Load("chat", synthetic_requests(SYNTHETIC["chat"], 300, 1e9, seed=7), 100_000)
    rows = {name: replay(load, make()) for name, make in POLICIES.items()}
    assert dominates(rows), verdict(rows)
    assert len(as_table(list(rows.items())).splitlines()) == 2 + len(POLICIES)


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
