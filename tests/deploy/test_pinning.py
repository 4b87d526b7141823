"""Workers on cores of their own, over real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.pinning import pin_workers

# Waits until its standard input ends.
WORKER = "import sys; print('up', flush=True); sys.stdin.read()\n"


@contextmanager
def running(folder: Path, *modules: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Each as `python -m module`, a child of this process."""
    children = []
    try:
        for module in modules:
            (folder / f"{module}.py").write_text(WORKER)
            child = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            children.append(child)
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
        yield children
    finally:
        for child in children:
            child.communicate()


def test_prefill_workers_take_cores_first_and_who_finds_none_stays_free(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    modules = ["gateway", "decode_worker", *["prefill_worker"] * len(cores)]
    with running(tmp_path, *modules) as (gateway, decode, *prefills):
        pin_workers(os.getpid())
        assert [os.sched_getaffinity(each.pid) for each in prefills] == [{c} for c in cores]
        assert os.sched_getaffinity(decode.pid) == os.sched_getaffinity(gateway.pid) == set(cores)


def test_who_has_no_workers_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "gateway") as (gateway,):
        pin_workers(os.getpid())
        assert os.sched_getaffinity(gateway.pid) == os.sched_getaffinity(0)
