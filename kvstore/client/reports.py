"""What a client reports: to nodes, what it read there without their help; to its user, how often rare events occurred.

Reports of use tell nodes what is in use and what is hot. A report that is not answered is also how the death of a node
is noticed whose memory is mapped here. Their rule: readers never wait for them, and what is too much is dropped.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from kvstore.client.backstage import Backstage
from kvstore.client.deadline import PATIENCE
from kvstore.client.node import StoreNode
from protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from protocol.keys import KEY_BYTES
from protocol.pb import kvstore_pb2

GATHER_S = 0.1
"""Waking the sender costs a reader up to a turn of the interpreter (milliseconds), so it is done this rarely however
many keys there are."""
_MAX_BYTES = 8192 * KEY_BYTES
"""Of keys per node and message; a reader that is faster is not slowed down by the reports."""
LAST_REPORTS_S = 1.0
"""For reports of what was read, when a client closes: a node that does not answer holds up nobody who ends."""


class Event(StrEnum):
    """What a client counts. Reads that go well are not among it: the nodes count them."""

    CORRUPT = "corrupt_replicas"
    """Found and reported to their node; another replica was tried."""
    FAILOVER = "failovers"
    """A node did not answer and another one was asked."""
    LEASED_READ = "leased_reads"
    """Objects that could not be read without their node's help: on disk, or moving."""
    UNREPORTED = "unreported_reads"
    """Objects whose use was not reported, since there was too much of it."""


class Counters:
    """Counts of events since the client was made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Event] = Counter()

    def count(self, event: Event, times: int = 1) -> None:
        with self._lock:
            self._counts[event] += times

    def all(self) -> Mapping[str, int]:
        with self._lock:
            return MappingProxyType({str(event): self._counts[event] for event in Event})


class Touches:
    """Reports of use that are gathered and sent backstage. Thread-safe."""

    def __init__(self, backstage: Backstage, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._pending: dict[StoreNode, bytearray] = {}  # keys, back to back
        self._under_way: set[concurrent.futures.Future[None]] = set()
        self._due = asyncio.Event()
        self._backstage = backstage
        self._sending = backstage.begin(self._send_all())

    def note(self, node: StoreNode, packed_keys: bytes) -> None:
        """These keys, back to back, were read at `node`, or only looked for when there are none."""
        with self._lock:
            first = not self._pending
            pending = self._pending.setdefault(node, bytearray())
            room = _MAX_BYTES - len(pending)
            pending += packed_keys[:room]
        if first:
            self._backstage.wake(self._due)
        if len(packed_keys) > room:
            self._counters.count(Event.UNREPORTED, (len(packed_keys) - room) // KEY_BYTES)

    def flush(self, timeout_s: float) -> None:
        """Sends what there is and waits for the answers, also to what was sent before."""
        self._backstage.ask(self._send_pending(), timeout_s)

    async def last(self, timeout_s: float) -> None:
        """As `flush`, for a caller in the backstage's own loop. What is not answered in time is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._send_pending()

    async def _send_all(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(GATHER_S)
            self._due.clear()
            await self._send_pending()

    async def _send_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for node, packed in pending.items():
            report = self._backstage.begin(self._send(node, packed))
            self._under_way.add(report)
            report.add_done_callback(self._under_way.discard)
        if self._under_way:
            await asyncio.wait(map(asyncio.wrap_future, tuple(self._under_way)))

    async def _send(self, node: StoreNode, packed_keys: bytearray) -> None:
        if node.attachment is None:  # lost meanwhile, and told so
            return
        request = kvstore_pb2.StoreTouchRequest(keys=bytes(packed_keys))
        try:
            await node.ask(lambda stub: stub.Touch, request, PATIENCE.base_s)
        except (PeerLost, DeadlineExceeded) as error:
            node.lost(error)
        except MoonserveError:  # then they do not count as used
            self._counters.count(Event.UNREPORTED, len(packed_keys) // KEY_BYTES)
