"""The engine's speed is told in the right units, against the right floor, by contestants that really ran."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.engine.shapes import DEMO_FOLDER, Shape, model_folder, step_bytes
from benchmarks.engine.speed import CONTESTANTS, Side, bars


def test_a_step_reads_all_matrices_once_and_the_kv_of_every_sequence(tmp_path: Path) -> None:
    folder = model_folder("110M", tmp_path)
    layer = 768 * (12 + 4 + 4) * 64 + 12 * 64 * 768 + 3 * 768 * 2048
    weights = 12 * layer + 32_000 * 768
    kv = 2 * 12 * 4 * 64
    assert step_bytes(folder, "bfloat16", Shape(batch=8, context=512)) == 2 * (
        weights + 8 * 512 * kv
    )
    assert step_bytes(folder, "float32", Shape(batch=1, context=1)) == 4 * (weights + kv)


def test_bars_take_one_core_and_bfloat16_and_leave_open_what_was_not_measured() -> None:
    fast = {"B1 C512": 0.001, "B8 C512": 0.02, "prefill 2048": 1.0}
    runs = [
        {"cores": 1, "model": "110M", "dtype": "bfloat16", "seconds": {"moonserve native": fast}},
        {"cores": 2, "model": "demo", "dtype": "bfloat16", "seconds": {}},
    ]
    single, eight, prefill, demo = bars(runs)
    assert (single["measured"], single["met"]) == (1.0, True)
    assert (eight["measured"], eight["met"]) == (20.0, False)
    assert (prefill["measured"], prefill["met"]) == (2048.0, True)
    assert (demo["measured"], demo["met"]) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_decodes_and_prefills_in_a_process_of_its_own(name: str) -> None:
    side = Side(name, DEMO_FOLDER, "float32", sorted(os.sched_getaffinity(0))[:1])
    try:
        side.wait_until_ready()
        for shape, least in ((Shape(batch=2, context=40), 1), (Shape(prompt=70), 1)):
            assert side.prepare(shape) > 0
            times = side.run(shape)
            assert len(times) >= least
            assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)
    finally:
        side.close()
