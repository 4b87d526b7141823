"""One role's time in a worker's life: it ends when the process is told to stop or another role is to begin.

To the role's own code it is the process's lifecycle. Knows nothing of what a role does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from protocol.errors import Overloaded
from protocol.ids import Role
from protocol.process import Lifecycle, running

_RETRY_AFTER_S = 1.0


class Turn(Lifecycle):
    """`drain_s`: what is under way gets so long to finish before another role begins."""

    def __init__(self, role: Role, process: Lifecycle, *, drain_s: float) -> None:
        super().__init__(status_fd=None)
        self.role = role
        self._process = process
        self._drain_s = drain_s
        self._wanted: Role | None = None  # once a switch was asked for

    @property
    def next_role(self) -> Role | None:
        """None: the process ends with this turn, as far as known."""
        return None if self._process.stopping.is_set() else self._wanted

    @property
    def is_switching(self) -> bool:
        return self._wanted is not None

    def switch_to(self, role: Role, drain_s: float | None = None) -> None:
        """Ends the turn so that `role` begins; no-op when it is its own. Raises Overloaded when the other one has been
        asked for."""
        if role is self.role:
            if self.is_switching:
                raise Overloaded(
                    f"this worker is changing from {self.role} to {self._wanted}",
                    retry_after_s=_RETRY_AFTER_S,
                )
            return
        if not self.is_switching:
            self._wanted = role
            self._drain_s = self._drain_s if drain_s is None else drain_s
            self.stopping.set()

    async def end_with_process(self) -> None:
        """Run beside the turn."""
        await self._process.stopping.wait()
        self.stopping.set()

    # What a role's code calls

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self._process.progress(stage, fraction)

    def ready(self, **facts: str) -> None:
        self._process.ready(role=self.role.value, **facts)

    async def drained(self, idle: Coroutine[Any, Any, Any], timeout_s: float) -> bool:
        """A process that is told to stop grants what it would grant without turns."""
        async with running(idle) as finishing, running(self._process.stopping.wait()) as told:
            await asyncio.wait(
                {finishing, told}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED
            )
            if told.done():
                await self._process.drained(asyncio.wait({finishing}), timeout_s)
            return finishing.done()
