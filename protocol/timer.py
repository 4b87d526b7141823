"""Waiting by the event loop's timers: until the next instant at which a `state.py` has something due, or for an event
and not for ever.

Knows the loop's timers and the service's clock, not what is due.
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


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether `event` is set before the time is over.

    Not `wait_for`, which in Python 3.11 loses a cancellation that comes together with the event.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
