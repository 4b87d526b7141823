"""Tests of the GPU checks, rehearsed without a GPU at a tiny size; without a rehearsal they report a missing GPU."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from benchmarks.gpu_check.__main__ import NO_GPU, main

REHEARSED = {"graphs", "decode attention", "staging", "ahead", "handoff", "workers", "models"}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the checks themselves can run")


def test_without_a_gpu_it_says_so_and_a_rehearsal_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tests/engine/cuda` covers the other checks. All run in one process, which takes seconds to start."""
    assert main([]) == NO_GPU
    assert "no GPU" in capsys.readouterr().out
    out = tmp_path / "gpu.json"
    assert main(["--rehearse", "--only", *REHEARSED, "--out", str(out), "--budget-s", "900"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["status"] for row in rows].count("pass") == len(rows) >= len(REHEARSED)
    assert rows[0]["name"] in capsys.readouterr().out
