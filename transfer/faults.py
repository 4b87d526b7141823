"""Faults to order, off by default: what a cluster must survive, made to happen.

Each engine applies the plan to the batches it submits itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class FaultPlan:
    """Counters run down as faults happen; they may be raised again at any time."""

    corrupt_writes: int = 0
    """One byte is flipped on the way in this many WRITEs (per peer, window and batch)."""
    drop_connections: int = 0
    """This many batches lose their connection and fail with PeerLost."""
    delay_s: float = 0.0
    """Added to every batch."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take_corrupt_write(self) -> bool:
        with self._lock:
            self.corrupt_writes -= (taken := self.corrupt_writes > 0)
        return taken

    def take_drop(self) -> bool:
        with self._lock:
            self.drop_connections -= (taken := self.drop_connections > 0)
        return taken
