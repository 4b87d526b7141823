"""Timers of the event loop: for the next time at which a `state.py` has something due, and for an event with a timeout.

The module knows the loop's timers and the service's clock, not what is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Timer:
    """Calls `ring` at the time last passed to `set`, or slightly before it. `ring` must call `set` again."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None
        self._due_at: float | None = None

    def set(self, due_at: float | None) -> None:
        """Sets the time on `clock`; None = nothing is due. No-op if the time is unchanged."""
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
    """Waits for `event` and returns true, or false after `timeout_s`.

    `wait_for` is not used, since in Python 3.11 it loses a cancellation that coincides with the event.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
