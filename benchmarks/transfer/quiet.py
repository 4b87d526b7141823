"""Measures the processor use of processes outside the benchmark."""

from __future__ import annotations

import os
import time

import psutil


class Quiet:
    """Processor use of other processes since the creation of this object."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._others_s = _others_s()

    def others_cores(self) -> float:
        """Returns their mean number of busy cores. Call it after all of the benchmark's processes have ended."""
        return (_others_s() - self._others_s) / (time.monotonic() - self._since)


def _others_s() -> float:
    everybody = psutil.cpu_times()
    busy = sum(everybody) - everybody.idle - everybody.iowait - everybody.guest
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system
