"""The checks for a GPU run without one, tiny and interpreted; without either it is said that nothing was verified."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'"
)

from benchmarks.gpu_check.__main__ import NO_GPU, main
from benchmarks.gpu_check.bench import REHEARSAL, Bench, Ceilings
from benchmarks.gpu_check.checks import Check, run_checks
from benchmarks.gpu_check.rows import Row, at_least, at_most
from tests.ports import free_port

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the checks themselves can run")

BENCH = Bench(
    device=torch.device("cpu"),
    scale=REHEARSAL,
    ceilings=Ceilings(copy_bytes_per_s=1e9, flops_per_s=1e9),
)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == NO_GPU
    assert "no GPU" in capsys.readouterr().out


def test_a_rehearsal_passes_and_leaves_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    assert main(["--rehearse", "--only", "fused kernels", "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert {row["status"] for row in document["rows"]} == {"pass"}
    assert all(row["name"] in capsys.readouterr().out for row in document["rows"][:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["graphs", "decode attention", "ahead", "handoff", "workers", "models"]
)
def test_each_check_can_be_rehearsed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local.free_port", free_port)
    rows = list(run_checks(BENCH, check, time.monotonic() + 600))
    assert rows
    assert [row for row in rows if row.status == "fail"] == []


def test_a_check_that_breaks_is_a_row_and_the_others_run() -> None:
    def breaks(_bench: Bench) -> Iterator[Row]:
        yield at_least("first", 2.0, 1.0, "", "")
        raise RuntimeError("out of shared memory")

    def works(_bench: Bench) -> Iterator[Row]:
        yield at_most("last", float("nan"), 1.0, "", "")

    checks = (Check("breaks", 0, breaks), Check("works", 0, works))
    rows = list(run_checks(BENCH, "", time.monotonic() + 60, checks))
    assert [(row.name, row.status) for row in rows] == [
        ("first", "pass"),
        ("breaks", "fail"),
        ("last", "fail"),  # NaN is within no bound
    ]
    assert "out of shared memory" in rows[1].reason


def test_a_check_without_time_is_skipped() -> None:
    checks = (Check("long", 1e6, lambda _bench: iter(())),)
    [row] = run_checks(BENCH, "", time.monotonic() + 60, checks)
    assert row.status == "skipped"
    assert "left" in row.reason
