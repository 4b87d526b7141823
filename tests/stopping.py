"""SIGSTOP that has happened: a process that was only sent it goes on answering for a while, on a busy machine for long.

Knows nothing of what the process is. SIGCONT needs no such care: whoever waits for the process to go on waits for more.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.patience import until


def stop(pid: int) -> None:
    """Returns once no thread of the process runs."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _is_stopped(pid))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """No thread of the process runs within."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)
