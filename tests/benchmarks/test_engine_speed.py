"""The engine's speed is told in the right units, against the right floor, by contestants that really ran."""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from benchmarks.engine.bandwidth import read_bytes_per_s
from benchmarks.engine.contest import Side, measure_shape, undisturbed
from benchmarks.engine.contestants import (
    LLAMA_CPP,
    NATIVE,
    TORCH,
    TRANSFORMERS,
    VLLM,
    Wish,
)
from benchmarks.engine.floor import step_bytes
from benchmarks.engine.shapes import DEMO_FOLDER, SMALL, Shape, prompt_tokens
from benchmarks.engine.speed_report import bars, speed_table
from benchmarks.engine.turn import Turn, Watch


def test_a_step_reads_all_matrices_once_and_the_kv_of_every_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    layer = 768 * (12 + 4 + 4) * 64 + 12 * 64 * 768 + 3 * 768 * 2048
    weights = 12 * layer + 32_000 * 768
    kv = 2 * 12 * 4 * 64
    assert step_bytes(tmp_path, "bfloat16", Shape(batch=8, context=512)) == 2 * (
        weights + 8 * 512 * kv
    )
    assert step_bytes(tmp_path, "float32", Shape(batch=1, context=1)) == 4 * (weights + kv)


def _figures(wall_s: float, label: str = "B1 C512") -> dict[str, dict[str, float]]:
    return {label: {"wall_s": wall_s, "processor_s": wall_s / 2, "waited": 0.0}}


def test_bars_take_one_core_and_bfloat16_and_leave_open_what_was_not_measured() -> None:
    found = {NATIVE: _figures(0.010), VLLM: _figures(0.020), LLAMA_CPP: _figures(0.008)}
    run = {"model": "110M", "cores": 1, "dtype": "bfloat16", "figures": found}
    others = {"model": "demo", "cores": 2, "dtype": "bfloat16", "figures": found}
    said = {bar["claim"]: bar for bar in bars([run, others])}
    vllm, llama = said["110M B1 C512, times vLLM"], said["110M B1 C512, times llama.cpp"]
    assert (vllm["measured"], vllm["of_processor"], vllm["met"]) == (2.0, 2.0, True)
    assert (llama["measured"], llama["met"]) == (0.8, False)
    assert said["110M B8 C512, times vLLM"]["met"] is None
    assert said["demo B1 C512, times transformers"]["met"] is None


def test_a_table_names_who_is_not_installed_and_whose_tokens_are_others() -> None:
    run = {
        "model": "110M",
        "cores": 1,
        "dtype": "float32",
        "figures": {
            NATIVE: _figures(0.010) | _figures(2.0, "prefill 512"),
            LLAMA_CPP: _figures(0.020) | _figures(4.0, "prefill 512"),
        },
        "floor": {"B1 C512": 0.005},
        "bytes_per_s": 38e9,
        "differing": [LLAMA_CPP],
    }
    lines = speed_table(run, (NATIVE, VLLM, LLAMA_CPP)).splitlines()
    assert lines[2:] == [
        "| moonserve native | 10.00 (5.00) | 256 (512) |",
        "| vLLM | not installed | – |",
        "| llama.cpp (other tokens!) | 20.00 (10.00) | 128 (256) |",
        "| floor at 38 GB/s | 5.00 | – |",
    ]


def test_prompts_of_one_seed_begin_alike_and_those_of_two_do_not() -> None:
    assert prompt_tokens(3, 50, 4096)[:20] == prompt_tokens(3, 20, 4096)
    assert prompt_tokens(3, 1, 4096) != prompt_tokens(4, 1, 4096)


def test_a_watch_tells_of_every_step_and_counts_its_tokens() -> None:
    watch = Watch()
    watch.step(3)
    watch.step(2)
    turn = watch.done()
    assert (len(turn.wall_s), len(turn.processor_s), turn.tokens) == (2, 2, 5)
    assert min(turn.wall_s) > 0
    assert turn.waited_s >= 0


class _Scripted:
    """A side whose turns are given."""

    def __init__(self, *waited_s: float) -> None:
        self.left = [Turn([1.0], [1.0], 1, waited) for waited in waited_s]

    def run(self, _shape: Shape) -> Turn:
        return self.left.pop(0)


@pytest.mark.parametrize(
    ("waited_s", "kept", "left"),
    [
        ((0.01, 0.0), 0.01, 1),  # nobody was in the way
        ((0.5, 0.02, 0.0), 0.02, 1),
        ((0.5, 0.4, 0.6, 0.0), 0.4, 1),  # two more and no others
    ],
)
def test_a_disturbed_turn_is_taken_again_and_the_least_disturbed_counts(
    waited_s: tuple[float, ...], kept: float, left: int
) -> None:
    side = _Scripted(*waited_s)
    assert undisturbed(cast(Side, side), Shape(), retakes=2).waited_s == kept
    assert len(side.left) == left


@pytest.mark.slow
def test_contestants_take_turns_in_processes_of_their_own_and_give_the_same_tokens(
    tmp_path: Path,
) -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    with ExitStack() as stack:
        sides = {}
        for name in (NATIVE, TORCH, TRANSFORMERS):
            sides[name] = Side(
                Wish(
                    name=name,
                    folder=str(DEMO_FOLDER),
                    scratch=str(tmp_path),
                    dtype="float32",
                    cores=cores,
                )
            )
            stack.callback(sides[name].close)
        for side in sides.values():
            side.wait_until_ready()
        prompt = prompt_tokens(0, 40, 4096)
        tokens = [side.greedy(prompt, 6) for side in sides.values()]
        assert len(tokens[0]) == 6
        assert tokens.count(tokens[0]) == len(tokens)
        for shape in (Shape(batch=2, context=40), Shape(prompt=70)):
            for seconds in measure_shape(sides, shape, rounds=2, retakes=0).values():
                assert all(math.isfinite(value) and value >= 0 for value in seconds.values())
                assert seconds["wall_s"] > 0


def test_bandwidth_is_measured_on_one_core_and_on_all_that_are_given() -> None:
    assert read_bytes_per_s() > 0
    assert read_bytes_per_s(sorted(os.sched_getaffinity(0))[:2]) > 0
