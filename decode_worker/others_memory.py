"""How long a worker waits for memory that others seem able to give before it takes its own sequences' instead. Pure.

What others say of themselves is some tenths of a second old, and two may count on the same pages: without a bound a
worker could wait for pages that nobody has, with all that it runs.
"""

from __future__ import annotations

PATIENCE_S = 1.0
"""Pages change hands within milliseconds; a busy machine takes a few hundred."""


class OthersMemory:
    """Of one worker."""

    def __init__(self) -> None:
        self._waited_since: float | None = None

    def may_come(self, now: float) -> bool:
        """Whether to go on waiting. `now` in monotonic seconds."""
        if self._waited_since is None:
            self._waited_since = now
        return now - self._waited_since < PATIENCE_S

    def came(self) -> None:
        """There was a block, wherever from."""
        self._waited_since = None
