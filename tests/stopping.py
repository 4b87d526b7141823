"""SIGSTOP that has taken effect. A process that has only been sent SIGSTOP still answers for a while on a busy machine.

Knows nothing about the process. SIGCONT needs no such wait, because its callers wait for an effect of the process.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.patience import until


def stop(pid: int) -> None:
    """Suspends the process and returns once none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _is_stopped(pid))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Suspends all threads of the process within the block, in which it may end."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "TZ" for stat in stats)
