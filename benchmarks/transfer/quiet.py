"""How quiet the machine was: what processes other than the benchmark's used meanwhile."""

from __future__ import annotations

import os
import time

import psutil


class Quiet:
    """From its making on."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._others_s = _others_s()

    def others_cores(self) -> float:
        """On average. Call it when all of the benchmark's processes have ended."""
        return (_others_s() - self._others_s) / (time.monotonic() - self._since)


def _others_s() -> float:
    everybody = psutil.cpu_times()
    busy = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system
