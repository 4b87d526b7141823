"""Tells nodes what was read of them without their help, so that they know what is in use and what is hot.

Also how the death of a node is noticed whose memory is mapped here: a report that is not answered. Its rule: readers
never wait for it, and what is too much is dropped.
"""

from __future__ import annotations

import asyncio
import threading

from kvstore.client.backstage import Backstage
from kvstore.client.counters import Counters, Event
from kvstore.client.node import StoreNode
from protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from protocol.keys import KEY_BYTES
from protocol.pb import kvstore_pb2

GATHER_S = 0.1
"""Waking the sender costs a reader up to a turn of the interpreter (milliseconds), so it is done this rarely however
many keys there are."""
_MAX_BYTES = 8192 * KEY_BYTES
"""Of keys per node and message; a reader that is faster is not slowed down by the reports."""
_TIMEOUT_S = 2.0


class Touches:
    """Thread-safe."""

    def __init__(self, backstage: Backstage, counters: Counters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._pending: dict[StoreNode, bytearray] = {}  # keys, back to back
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
        """Sends what there is and waits for the answers."""
        self._backstage.ask(self._send_pending(), timeout_s)

    async def _send_all(self) -> None:
        while True:
            await self._due.wait()
            await asyncio.sleep(GATHER_S)
            self._due.clear()
            await self._send_pending()

    async def _send_pending(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
        await asyncio.gather(*(self._send(node, packed) for node, packed in pending.items()))

    async def _send(self, node: StoreNode, packed_keys: bytearray) -> None:
        if not node.is_attached:  # lost meanwhile, and told so
            return
        request = kvstore_pb2.StoreTouchRequest(keys=bytes(packed_keys))
        try:
            await node.ask(lambda stub: stub.Touch, request, _TIMEOUT_S)
        except (PeerLost, DeadlineExceeded) as error:
            node.lost(error)
        except MoonserveError:  # then they do not count as used
            self._counters.count(Event.UNREPORTED, len(packed_keys) // KEY_BYTES)
