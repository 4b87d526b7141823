"""Tests of the GPU checks, rehearsed without a GPU at a tiny size; without a rehearsal they report a missing GPU."""

import json
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")

from benchmarks.gpu_check.__main__ import NO_GPU, main
from benchmarks.gpu_check.checks import run_checks
from benchmarks.gpu_check.context import REHEARSAL, Ceilings, CheckContext

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


@pytest.mark.parametrize("check", ["graphs", "decode attention", "staging", "ahead", "handoff", "workers", "models"])
def test_each_check_can_be_rehearsed(check: str) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, flops_per_s=1e9)
    bench = CheckContext(device=torch.device("cpu"), scale=REHEARSAL, ceilings=ceilings)
    rows = list(run_checks(bench, check, time.monotonic() + 600))
    assert rows
    assert [row for row in rows if row.status == "fail"] == []
