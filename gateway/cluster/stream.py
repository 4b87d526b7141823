"""Events stream of one worker: when it opened and last spoke, its waiters, and whether events were missed.

A broken stream loses the messages in flight, and the worker may write to it for a while after the gateway has noticed.
A worker that does not reach its gateway for long gives up the gateway and its requests. Either may lose a request's
last token, after which nothing would ever arrive. Therefore the worker reports at the start of each stream how many
batches it has sent and how often it has given up this gateway.
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
    is_open: bool = False  # something has arrived since it was opened
    is_broken: bool = False  # it was open before, or could not be opened
    opened_at: float = 0.0  # time of the first message
    spoke_at: float = 0.0  # time of the last message
    num_looks: int = 0  # number of looks since the last message
    reading: asyncio.Timeout | None = None  # timeout of the reader, while the stream is open
    task: asyncio.Task[None] | None = None
    _heard: tuple[int, int] = (0, 0)  # times that the worker gave this gateway up, batches since then
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # set when it has opened or failed to open

    def begins(self, standing: worker_pb2.Standing) -> bool:
        """Records the start of a stream. Returns False if events were missed or requests given up in between."""
        before, self._heard = self._heard, (standing.times_given_up, standing.num_batches)
        return before == self._heard

    def came(self) -> None:
        """Counts a batch other than the first one of a stream."""
        self._heard = (self._heard[0], self._heard[1] + 1)

    def speaks(self, now: float) -> None:
        if not self.is_open:
            self.is_open, self.opened_at = True, now
            self.is_broken = False
            self._settled.set()
        self.spoke_at, self.num_looks = now, 0

    def look(self, now: float) -> None:
        """Breaks the stream if nothing has come for long, not even a sign of life. Requires several looks in that time,
        which show that this process itself was not stopped."""
        self.num_looks += 1
        if self.is_open and now - self.spoke_at > SILENT_AFTER_S and self.num_looks >= _LOOKS:
            assert self.reading is not None, "it is open"
            self.reading.reschedule(0.0)  # now

    def ended(self) -> None:
        """Records that the stream has ended or could not be opened."""
        self.is_open, self.is_broken = False, True
        self._settled.set()

    async def pause(self) -> None:
        """Waits before the stream is opened again; returns at once if a request waits for it."""
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REOPEN_DELAY_S):
                await self._wanted.wait()
        self._wanted.clear()

    async def until_settled(self) -> None:
        """Waits until a broken stream is open again or fails to open, at most `_SETTLED_WITHIN_S`."""
        self._wanted.set()
        self._settled.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                await self._settled.wait()
