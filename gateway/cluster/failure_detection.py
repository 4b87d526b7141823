"""When a worker counts as lost: its heartbeats are late (`FailureDetector`, pure), or its events stream is silent,
broken or has missed events (`WorkerStream`).

A stopped process or hanging host closes no connection for many seconds, so heartbeats decide. Rule: a worker counts as
lost if neither the conductor nor this gateway has heard from it for a while and another worker of its role was heard.
If there is no other, waiting for it is the best option. A silent worker may wake up again; its messages about requests
that have moved elsewhere are then ignored.

That time depends on the lateness of workers that spoke again. Where many processes share few processors, heartbeats
come late; treating that as death would send requests from one live worker to the next until they are given up. It is
`SUSPECT_AFTER_S` if all workers are punctual.

A broken stream loses the messages in flight, and the worker may write to it for a while after the gateway has noticed.
A worker that does not reach its gateway for long gives up the gateway and its requests. Either may lose a request's
last token, after which nothing would ever arrive. Therefore the worker reports at the start of each stream how many
batches it has sent and how often it has given up this gateway.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from moonserve.protocol.pb import worker_pb2
from moonserve.protocol.process.event_loop import wait_event
from moonserve.protocol.request import Endpoint, Role

# Two heartbeats. Less would treat workers on busy machines as dead; more adds to the longest gap in a stream.
SUSPECT_AFTER_S = 2.0
# Factor on the longest lateness that ended by itself; a heartbeat due just before a check is late by one interval.
_MARGIN = 1.75
# The conductor has by then removed an instance that it has not heard from, unless it has another lease.
_MAX_SUSPECT_AFTER_S = 5.0
_HALF_LIFE_S = 30.0  # of the observed lateness
# One heartbeat and its delay: a worker that is silent for longer is checked again soon.
LATE_AFTER_S = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSign:
    """Most recent sign of life of one worker."""

    instance_id: str
    role: Role
    draining: bool
    last_heard_s: float  # seconds since the conductor heard it
    last_message_s: float  # seconds since its last message on this gateway's stream


class FailureDetector:
    """Lateness of one gateway's workers, and which of them count as lost. `now`: seconds, on any clock."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # at the last check
        self._longest_s, self._seen_at = 0.0, 0.0  # longest lateness of workers that spoke again

    def find_silent(self, signs: Collection[LifeSign], now: float) -> set[str]:
        """Returns the ids of workers that count as lost."""
        self._observe(signs, now)
        after_s = min(max(SUSPECT_AFTER_S, _MARGIN * self._lateness_s(now)), _MAX_SUSPECT_AFTER_S)
        roles = {s.role for s in signs if s.last_heard_s < LATE_AFTER_S and not s.draining}
        return {s.instance_id for s in signs if min(s.last_heard_s, s.last_message_s) >= after_s and s.role in roles}

    def _observe(self, signs: Collection[LifeSign], now: float) -> None:
        again = [self._heard_s.get(s.instance_id, 0.0) for s in signs if self._spoke(s)]
        if (longest_s := max(again, default=0.0)) > self._lateness_s(now):
            self._longest_s, self._seen_at = longest_s, now
        self._heard_s = {s.instance_id: s.last_heard_s for s in signs}

    def _spoke(self, sign: LifeSign) -> bool:
        """True if the worker has spoken since the last check."""
        return sign.last_heard_s < self._heard_s.get(sign.instance_id, 0.0)

    def _lateness_s(self, now: float) -> float:
        faded: float = 0.5 ** ((now - self._seen_at) / _HALF_LIFE_S)
        return self._longest_s * faded


def is_late(signs: Collection[LifeSign]) -> bool:
    """Returns True if any worker may be about to fall silent."""
    return any(s.last_heard_s >= LATE_AFTER_S for s in signs)


_REOPEN_DELAY_S = 0.2
_SETTLED_WITHIN_S = 1.0
STREAM_SILENT_AFTER_S = 15.0
"""Three signs of life (`worker.token_streams`)."""
_MIN_CHECKS = 3


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerStream:
    """Events stream of one incarnation of a worker."""

    endpoint: Endpoint
    is_open: bool = False  # something has arrived since it was opened
    is_broken: bool = False  # it was open before, or could not be opened
    opened_at: float = 0.0  # time of the first message
    last_message_at: float = 0.0  # time of the last message
    num_checks: int = 0  # since the last message
    read_timeout: asyncio.Timeout | None = None  # timeout of the reader, while the stream is open
    task: asyncio.Task[None] | None = None
    _received: tuple[int, int] = (0, 0)  # times that the worker gave this gateway up, batches since then
    _reopen_requested: asyncio.Event = field(default_factory=asyncio.Event)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # set when it has opened or failed to open

    def on_standing(self, standing: worker_pb2.Standing) -> bool:
        """Records the start of a stream. Returns False if events were missed or requests given up in between."""
        before, self._received = self._received, (standing.times_given_up, standing.num_batches)
        return before == self._received

    def on_batch(self) -> None:
        """Counts a batch other than the first one of a stream."""
        self._received = (self._received[0], self._received[1] + 1)

    def on_message(self, now: float) -> None:
        if not self.is_open:
            self.is_open, self.opened_at = True, now
            self.is_broken = False
            self._settled.set()
        self.last_message_at, self.num_checks = now, 0

    def check_silence(self, now: float) -> None:
        """Breaks the stream if nothing has come for long, not even a sign of life. Requires several checks in that
        time, which show that this process itself was not stopped."""
        self.num_checks += 1
        if self.is_open and now - self.last_message_at > STREAM_SILENT_AFTER_S and self.num_checks >= _MIN_CHECKS:
            assert self.read_timeout is not None, "it is open"
            self.read_timeout.reschedule(0.0)  # now

    def on_end(self) -> None:
        """Records that the stream has ended or could not be opened."""
        self.is_open, self.is_broken = False, True
        self._settled.set()

    async def wait_before_reopening(self) -> None:
        """Waits before the stream is opened again; returns at once if a request waits for it."""
        self._settled.clear()
        await wait_event(self._reopen_requested, _REOPEN_DELAY_S)
        self._reopen_requested.clear()

    async def wait_until_settled(self) -> None:
        """Waits until a broken stream is open again or fails to open, at most `_SETTLED_WITHIN_S`."""
        self._reopen_requested.set()
        self._settled.clear()
        await wait_event(self._settled, _SETTLED_WITHIN_S)
