"""Which tests run beside which, when several processes run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scheduling import APART, FIRST, TOGETHER

ROOT = Path(__file__).parents[1]

CONFTEST = """
from tests import scheduling
from tests.conftest import *

scheduling.FIRST = ("test_meeting.py",)
scheduling.APART = ("test_meeting.py",)
"""
MEETING = """
def test_one_end(): open("fifo", "w").close()

def test_the_other_end(): open("fifo").close()
"""
SHARING = """
seen = []

def test_first(): seen.append("first")

def test_second(): assert seen == ["first"]

def test_third(): assert len(seen) == 1
"""


@pytest.mark.parametrize("begin", sorted({*FIRST, *APART, *TOGETHER}))
def test_what_is_named_is_there(begin: str) -> None:
    assert (ROOT / begin).exists()


def test_files_stay_together_and_what_is_apart_runs_at_the_same_time(tmp_path: Path) -> None:
    """An end of a pipe waits for the other one; what a file's tests share is in one process, in their order."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_meeting.py").write_text(MEETING)
    for number in range(6):
        (tmp_path / f"test_a{number}.py").write_text(SHARING)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--timeout=600",
            "-p",
            "no:cacheprovider",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout
