"""One timer, set to the next instant at which a `state.py` has something due.

Knows the event loop's timers and the service's clock, not what is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls `ring` when the instant last given to `set` has come, or a little before: `ring` sets it anew."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None
        self._due_at: float | None = None

    def set(self, due_at: float | None) -> None:
        """`due_at` by `clock`; None = nothing is due. Costs nothing when the instant is the same as before."""
        if due_at == self._due_at:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._due_at = None, due_at
        if due_at is not None:
            delay_s = max(0.0, due_at - self._clock())
            self._handle = asyncio.get_running_loop().call_later(delay_s, self._rang)

    def _rang(self) -> None:
        self._handle = self._due_at = None
        self._ring()
