"""Reports of a client: to nodes, which objects it read without their help; to its user, how often rare events occurred.

Reports of use show a node which objects are in use and which are hot. An unanswered report also reveals the death of a
node whose memory is mapped. Readers never wait for reports, and excess reports are dropped.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from moonserve.kvstore.client.node_access.background import BackgroundLoop
from moonserve.kvstore.client.node_access.deadline import PATIENCE
from moonserve.kvstore.client.node_access.node import StoreNode
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import KEY_BYTES
from moonserve.protocol.pb import kvstore_pb2

REPORT_EVERY_S = 0.1
"""Seconds between reports. Waking the sender costs a reader up to a turn of the interpreter (milliseconds), however
many keys there are."""
_MAX_BYTES = 8192 * KEY_BYTES
"""Bytes of keys per node and message. Faster readers are not slowed down; the excess is not reported."""
LAST_REPORTS_S = 1.0
"""Limit for the last reports when a client closes, so that an unresponsive node does not delay it for long."""


class ClientEvent(StrEnum):
    """Events that a client counts. Successful reads are not among them: the nodes count those."""

    CORRUPT = "corrupt_replicas"
    """Corrupt replicas found and reported to their node; another replica was tried."""
    FAILOVER = "failovers"
    """Nodes that did not answer, so that another one was asked."""
    LEASED_READ = "leased_reads"
    """Objects read with their node's help: on disk, or moving."""
    UNREPORTED = "unreported_reads"
    """Objects whose use was not reported, because there were too many or the report failed."""


class ClientCounters:
    """Thread-safe event counts since the client was created."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[ClientEvent] = Counter()

    def count(self, event: ClientEvent, times: int = 1) -> None:
        with self._lock:
            self._counts[event] += times

    def all(self) -> Mapping[str, int]:
        with self._lock:
            return MappingProxyType({str(event): self._counts[event] for event in ClientEvent})


class UseReports:
    """Gathers reports of use and sends them in the background loop. Thread-safe."""

    def __init__(self, background: BackgroundLoop, counters: ClientCounters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._pending: dict[StoreNode, bytearray] = {}  # keys, back to back
        self._under_way: set[concurrent.futures.Future[None]] = set()
        self._due = asyncio.Event()
        self._backstage = background
        self._sending = background.start(self._send_all())

    def note(self, node: StoreNode, packed_keys: bytes) -> None:
        """Records keys, back to back, that were read at `node`; no keys if they were only looked up."""
        with self._lock:
            first = not self._pending
            pending = self._pending.setdefault(node, bytearray())
            room = _MAX_BYTES - len(pending)
            pending += packed_keys[:room]
        if first:
            self._backstage.wake(self._due)
        if len(packed_keys) > room:
            self._counters.count(ClientEvent.UNREPORTED, (len(packed_keys) - room) // KEY_BYTES)

    def flush(self, timeout_s: float) -> None:
        """Sends pending reports and waits for the answers, including those to earlier reports."""
        self._backstage.run(self._send_pending(), timeout_s)

    async def flush_in_loop(self, timeout_s: float) -> None:
        """Does the same as `flush` in the background's own loop. Stops waiting after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._send_pending()

    async def _send_all(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(REPORT_EVERY_S)
            self._due.clear()
            await self._send_pending()

    async def _send_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        for node, packed in pending.items():
            report = self._backstage.start(self._send(node, packed))
            self._under_way.add(report)
            report.add_done_callback(self._under_way.discard)
        if self._under_way:
            await asyncio.wait(map(asyncio.wrap_future, tuple(self._under_way)))

    async def _send(self, node: StoreNode, packed_keys: bytearray) -> None:
        if node.attachment is None:  # lost meanwhile, and already marked as lost
            return
        request = kvstore_pb2.StoreTouchRequest(keys=bytes(packed_keys))
        try:
            await node.call_in_background(lambda stub: stub.Touch, request, PATIENCE.base_s)
        except (PeerLost, DeadlineExceeded) as error:
            node.mark_lost(error)
        except MoonserveError:  # these objects do not count as used
            self._counters.count(ClientEvent.UNREPORTED, len(packed_keys) // KEY_BYTES)
