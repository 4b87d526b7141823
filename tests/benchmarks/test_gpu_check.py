"""Tests of the GPU checks, rehearsed without a GPU at a tiny size; without a rehearsal they report a missing GPU."""

import json
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from benchmarks.gpu_check.__main__ import NO_GPU, main
from benchmarks.gpu_check.checks import CHECKS, run_checks
from benchmarks.gpu_check.context import REHEARSAL, Ceilings, CheckContext

REHEARSED = {"graphs", "decode attention", "staging", "ahead", "handoff", "workers", "models"}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the checks themselves can run")


def test_without_a_gpu_it_says_so_and_a_rehearsal_leaves_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == NO_GPU
    assert "no GPU" in capsys.readouterr().out
    out = tmp_path / "gpu.json"
    assert main(["--rehearse", "--only", "fused kernels", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["status"] for row in rows} == {"pass"}
    assert rows[0]["name"] in capsys.readouterr().out


def test_checks_can_be_rehearsed() -> None:
    """`tests/engine/cuda` covers the other ones. All run in one process, which takes seconds to start."""
    checks = [check for check in CHECKS if check.name in REHEARSED]
    ceilings = Ceilings(copy_bytes_per_s=1e9, flops_per_s=1e9)
    bench = CheckContext(device=torch.device("cpu"), scale=REHEARSAL, ceilings=ceilings)
    rows = list(run_checks(bench, "", time.monotonic() + 600, checks))
    assert [row for row in rows if row.status != "pass"] == []
    assert len(rows) >= len(REHEARSED)
