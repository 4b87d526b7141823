"""Whoever is struck is struck for as long as was said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import cast

import psutil

from tests.chaos.clock import Clock
from tests.chaos.schedule import Fault, Kind
from tests.chaos.striking import Striking
from tests.e2e.cluster import Cluster
from tests.patience import PATIENCE_S


class _Lone:
    """A cluster of one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def pids(self) -> dict[str, int]:
        return {"gateway-0": self._pid}


def _process(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def test_who_is_stopped_last_goes_on_before_the_end(tmp_path: Path) -> None:
    """Otherwise clients would wait for it, and the end for them."""
    victim = _process(
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); input()"
    )
    try:
        assert victim.stdout is not None
        victim.stdout.readline()  # it listens
        last = Fault(at_s=0.0, kind=Kind.STOP, victim="gateway-0", lasts_s=0.2)
        striking = Striking(cast(Cluster, _Lone(victim.pid)), [last], tmp_path, Clock())
        striking.start()
        striking.join(PATIENCE_S)
        assert striking.done == {"stop gateway": 1}
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    finally:
        victim.kill()
        victim.communicate()


def test_who_is_starting_is_left_alone(tmp_path: Path) -> None:
    starting = _process("input()")
    try:
        fault = Fault(at_s=0.0, kind=Kind.KILL, victim="gateway-0")
        striking = Striking(cast(Cluster, _Lone(starting.pid)), [fault], tmp_path, Clock())
        striking.start()
        striking.join(PATIENCE_S)
        assert (striking.skipped, starting.poll()) == (1, None)
    finally:
        starting.kill()
        starting.communicate()
