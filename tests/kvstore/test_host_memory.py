"""What a node believes to be left of the machine's memory, and that it does not start on more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.node import available_bytes
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemTotal: 100 kB\nMemAvailable: 80 kB\nSwapFree: 8 kB\n", "max\n", 88 * 1024),
        ("MemTotal: 100 kB\nMemAvailable: 80 kB\n", "4096\n", 4096),
        ("MemAvailable: 4 kB\n", "1000000\n", 4096),
        ("", "4096", 4096),
        ("nothing of use\n\n", "max", None),
        (None, None, None),
    ],
)
def test_the_smaller_of_the_machines_and_the_groups_counts(
    tmp_path: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    if meminfo is not None and limit is not None:
        (tmp_path / "meminfo").write_text(meminfo)
        (tmp_path / "limit").write_text(limit)
    assert available_bytes(tmp_path / "meminfo", tmp_path / "limit") == expected


def test_a_node_with_more_memory_than_there_is_ends_before_it_takes_any() -> None:
    """It would be ended by the kernel, or others in its place."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore", "--instance-id", "huge", "--dram", "100TiB"],
        env={**os.environ, "MOONSERVE_CLUSTER_TOKEN": "token"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "--dram" in ended.stderr
    assert "GiB" in ended.stderr
    assert "Traceback" not in ended.stderr
