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


def test_who_is_stopped_last_goes_on_before_the_end(tmp_path: Path) -> None:
    """Otherwise clients would wait for it, and the end for them."""
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        last = Fault(at_s=0.0, kind=Kind.STOP, victim="gateway-0", lasts_s=0.2)
        striking = Striking(cast(Cluster, _Lone(victim.pid)), [last], tmp_path, Clock())
        striking.start()
        striking.join(PATIENCE_S)
        assert striking.done == {"stop gateway": 1}
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    finally:
        victim.kill()
        victim.communicate()
