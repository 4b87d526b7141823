"""One worker's Events stream: when it opened and spoke, who waits for it, and whether events on it were missed.

A stream that breaks loses what was on its way, and the worker may go on writing to it after the gateway has noticed;
a gateway that seems to be away for long is given up, with its requests. Either may swallow the last token of a
request, after which nothing would ever come. So the worker says at the begin of each stream how many batches it has
sent and how often it has given this gateway up.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from protocol.pb import worker_pb2
from protocol.request import Endpoint

_REOPEN_DELAY_S = 0.2
_SETTLED_WITHIN_S = 1.0
SILENT_AFTER_S = 15.0
"""Three signs of life (`protocol.streams`)."""
_LOOKS = 3


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerStream:
    """Events stream of one incarnation of a worker."""

    endpoint: Endpoint
    is_open: bool = False  # something has come on it since it was opened
    is_broken: bool = False  # it was open once, or could not be opened
    opened_at: float = 0.0  # when the first of that came
    spoke_at: float = 0.0  # when something came last
    num_looks: int = 0  # at it since then
    reading: asyncio.Timeout | None = None  # while it is open
    task: asyncio.Task[None] | None = None
    _heard: tuple[int, int] = (0, 0)  # times that the worker gave us up, batches since
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # whether or not it opened

    def begins(self, standing: worker_pb2.Standing) -> bool:
        """A stream stands. False: events were missed since the last one, or all requests given up."""
        before, self._heard = self._heard, (standing.times_given_up, standing.num_batches)
        return before == self._heard

    def came(self) -> None:
        """A batch that is not a stream's first."""
        self._heard = (self._heard[0], self._heard[1] + 1)

    def speaks(self, now: float) -> None:
        if not self.is_open:
            self.is_open, self.opened_at = True, now
            self.is_broken = False
            self._settled.set()
        self.spoke_at, self.num_looks = now, 0

    def look(self, now: float) -> None:
        """Breaks it where it has said nothing for long, not even that its worker lives. Several looks in that time
        show that it was not this process that stood still."""
        self.num_looks += 1
        if self.is_open and now - self.spoke_at > SILENT_AFTER_S and self.num_looks >= _LOOKS:
            assert self.reading is not None, "it is open"
            self.reading.reschedule(0.0)  # now

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
        """Waits for a broken stream to be open again or to fail to open, at most `_SETTLED_WITHIN_S`."""
        self._wanted.set()
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                await self._settled.wait()
