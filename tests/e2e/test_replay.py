"""The replay tool against a real cluster, and the public trace when it is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, running_cluster
from tests.patience import PATIENCE_S
from tests.public_trace import TRACE, needs_trace

pytestmark = pytest.mark.e2e


def replay(cluster: Cluster, trace: Path, report: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy", "replay", str(trace), "--url", cluster.url]
    result = subprocess.run(
        [*command, "--output", str(report), *flags],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "hit ratio" in result.stdout
    written: dict[str, Any] = json.loads(report.read_text())
    return written


def test_repeated_prefixes_of_a_trace_are_reused_as_ideal_says(tmp_path: Path) -> None:
    """Requests far enough apart that every one finds all that came before it."""
    records = [
        {"timestamp": 4000 * n, "input_length": 512 * (n + 2), "output_length": 16,
         "hash_ids": list(range(n + 2))}
        for n in range(5)
    ]  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    with running_cluster(None, tmp_path / "logs") as cluster:
        report = replay(
            cluster, trace, tmp_path / "report.json", "--scale-lengths", "0.0625",
            "--scale-outputs", "0.25",
        )  # fmt: skip
    assert (report["completed"], report["failed"], report["rejected"]) == (5, 0, 0)
    assert report["total_output_tokens"] == 20
    assert report["hit_ratio"] == report["ideal_hit_ratio"] > 0.6


@needs_trace
@pytest.mark.trace
@pytest.mark.slow
def test_the_public_trace_replays_without_a_failure(tmp_path: Path) -> None:
    with running_cluster(None, tmp_path / "logs") as cluster:
        report = replay(
            cluster, TRACE, tmp_path / "report.json", "--limit", "60", "--scale-lengths", "0.0625",
            "--scale-outputs", "0.0625", "--speedup", "1",
        )  # fmt: skip
    assert (report["completed"], report["failed"]) == (60, 0)
    assert report["ideal_hit_ratio"] >= report["hit_ratio"] > 0
