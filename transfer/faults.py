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
    """One byte is flipped in this many WRITEs before the sender's checksum is made, as bad memory would:
    whoever verifies the blocks must notice (per peer and batch)."""
    corrupt_slices: int = 0
    """One byte is flipped in this many WRITEs after that, as a bad link would: the engine must notice."""
    drop_connections: int = 0
    """This many batches lose their connection and fail with PeerLost."""
    held: bool = False
    """No batch is begun while it is set."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def any(self) -> bool:
        """Something is still to go wrong."""
        return bool(
            self.corrupt_writes or self.corrupt_slices or self.drop_connections or self.held
        )

    def take_corrupt_slice(self) -> bool:
        with self._lock:
            self.corrupt_slices -= (taken := self.corrupt_slices > 0)
        return taken

    def take_corrupt_write(self) -> bool:
        with self._lock:
            self.corrupt_writes -= (taken := self.corrupt_writes > 0)
        return taken

    def take_drop(self) -> bool:
        with self._lock:
            self.drop_connections -= (taken := self.drop_connections > 0)
        return taken
