"""One worker's Events stream, as it stands: when it opened, when it spoke, and who waits for it to be open again."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from gateway.cluster.heard import Heard
from protocol.request import Endpoint

_REOPEN_DELAY_S = 0.2
_SETTLED_WITHIN_S = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerStream:
    """Of one incarnation."""

    endpoint: Endpoint
    heard: Heard = field(default_factory=Heard)
    is_open: bool = False  # something has come on it since it was opened
    is_broken: bool = False  # it was open once, or could not be opened
    opened_at: float = 0.0  # when the first of that came
    spoke_at: float = 0.0  # when something came last
    task: asyncio.Task[None] | None = None
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # whether or not it opened

    def speaks(self, now: float) -> None:
        if not self.is_open:
            self.is_open, self.opened_at = True, now
            self.is_broken = False
            self._settled.set()
        self.spoke_at = now

    def ended(self) -> None:
        """Or it could not be opened."""
        self.is_open, self.is_broken = False, True
        self._settled.set()

    async def pause(self) -> None:
        """Before it is opened again: at once where somebody waits for it."""
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REOPEN_DELAY_S):
                await self._wanted.wait()
        self._wanted.clear()

    async def until_settled(self) -> None:
        """Of one that is broken: until it is open again or could not be opened, or that takes too long."""
        self._wanted.set()
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                await self._settled.wait()
