"""Which tests run beside which, when several processes run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scheduling import APART, CLUSTERS, FIRST, TOGETHER, Scheduling

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


@pytest.mark.parametrize("begin", sorted({*FIRST, *APART, *CLUSTERS, *TOGETHER}))
def test_what_is_named_is_there(begin: str) -> None:
    assert (ROOT / begin).exists()


class Process:
    """A process of pytest's, as far as its scheduler knows it: what it is to run."""

    shutting_down = False
    gateway = SimpleNamespace(id="")

    def __init__(self) -> None:
        self.to_run: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.to_run += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_clusters_do_not_take_all_processes() -> None:
    """Until there is nothing else, one of two processes has such tests before it."""
    clusters = [f"{CLUSTERS[0]}test_{number}.py::test" for number in range(4)]
    tests = [*clusters, *(f"tests/test_{number}.py::test" for number in range(20))]
    option = SimpleNamespace(loadscopereorder=False)
    scheduling = Scheduling(SimpleNamespace(option=option, getvalue=lambda _: ["2*popen"]), None)  # type: ignore[arg-type]
    scheduling.log = lambda *_: None
    processes = [Process(), Process()]
    for process in processes:
        scheduling.add_node(process)
        scheduling.add_node_collection(process, tests)
    scheduling.schedule()
    num_done = 0
    while any(process.to_run for process in processes):
        waiting = [sum(tests[index] in clusters for index in p.to_run) for p in processes]
        assert 0 in waiting or not scheduling.workqueue
        for process in processes:
            if process.to_run:
                scheduling.mark_test_complete(process, process.to_run.pop(0))
                num_done += 1
    assert num_done == len(tests)


def test_files_stay_together_and_what_is_apart_runs_at_the_same_time(tmp_path: Path) -> None:
    """An end of a pipe waits for the other one; what a file's tests share is in one process, in their order."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_meeting.py").write_text(MEETING)
    for number in range(6):
        (tmp_path / f"test_a{number}.py").write_text(SHARING)
    done = run_in_two_processes(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 passed" in done.stdout


def run_in_two_processes(folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-n", "2", "--timeout=600", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
