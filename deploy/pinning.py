"""A local cluster's workers on processor cores of their own, for measuring: else two share one while others idle.

Its rule: prefill workers take the cores in turn, decode workers those that are left; where none is left they go where
the system puts them, like every other process. Reads /proc, so Linux only; elsewhere it does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_ROLES = ("prefill_worker", "decode_worker")  # in the order in which they take cores


def pin_workers(launcher_pid: int) -> None:
    """The workers among a launcher's children, all threads that they have by now. Who has ended is left out."""
    children = _children(launcher_pid)
    workers = [pid for role in _ROLES for pid, module in children if module == role]
    for pid, core in zip(workers, sorted(os.sched_getaffinity(0)), strict=False):
        _pin(pid, core)


def _pin(pid: int, core: int) -> None:
    try:
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            os.sched_setaffinity(int(thread.name), [core])
    except (FileNotFoundError, ProcessLookupError):
        return  # it ends; whoever started it sees that


def _children(parent_pid: int) -> Sequence[tuple[int, str]]:
    """Process ids, and the modules that they run, in order of their ids."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            arguments = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        parent = int(stat.rpartition(")")[2].split()[1])  # the name before it may have spaces
        if parent == parent_pid and "-m" in arguments:
            found.append((int(folder.name), arguments[arguments.index("-m") + 1]))
    return sorted(found)
