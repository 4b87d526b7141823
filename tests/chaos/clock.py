"""Time that passes for this process: not while the whole machine stands still, as a suspended virtual machine's does.

Clients would take that for silence and complain of it, and faults that were due meanwhile would all come at once.
"""

from __future__ import annotations

import threading
import time

_TICK_S = 0.05
_LONGEST_TICK_S = 2.0
"""What is longer was no wait for a processor."""


class Clock(threading.Thread):
    """Runs from its making to the process's end."""

    def __init__(self) -> None:
        super().__init__(name="clock", daemon=True)
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._ticked_at = time.monotonic()
        self.start()

    def run(self) -> None:
        while True:
            self.now()
            time.sleep(_TICK_S)

    def now(self) -> float:
        """Seconds since it was made."""
        with self._lock:
            at = time.monotonic()
            self._now_s += min(at - self._ticked_at, _LONGEST_TICK_S)
            self._ticked_at = at
            return self._now_s
