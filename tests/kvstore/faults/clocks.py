"""Processes whose wall clock jumps.

Setting the machine's clock would hit everything else that runs on it, and a time namespace shifts only the clocks that
are not affected anyway. So what Python code is told is shifted: `time.time` and `time.time_ns`, from the start by
`WALL_SHIFT_S` and by another step at each SIGUSR2. It does not reach clocks that are read in C; so gRPC, which adds
`time.time` to what its C core then compares with such a clock, is told the truth.
"""

from __future__ import annotations

import signal
from pathlib import Path

from tests.kvstore.faults.pool import Pool

DAY_S = 86_400

_SITE = """
import os, signal, sys, time
_time, _time_ns = time.time, time.time_ns
_shift = [int(os.environ["WALL_SHIFT_S"])]
def _jump(number, frame):
    _shift[0] += int(os.environ["WALL_STEP_S"])
def _off():
    return 0 if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc") else _shift[0]
time.time = lambda: _time() + _off()
time.time_ns = lambda: _time_ns() + _off() * 10**9
signal.signal(signal.SIGUSR2, _jump)
"""


def shifted(folder: Path, shift_s: int, step_s: int) -> dict[str, str]:
    """The environment of a process whose clock is off by `shift_s`, and by `step_s` more after each `jump`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": str(folder), "WALL_SHIFT_S": str(shift_s), "WALL_STEP_S": str(step_s)}


def jump(pool: Pool) -> None:
    """The clocks of all nodes make their step."""
    for node in pool.running.values():
        node.process.send_signal(signal.SIGUSR2)
