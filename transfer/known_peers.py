"""The peers of one engine by their addresses: made when they are first met, told to end when forgotten or long unused.

Its rule: who has been told to end is never handed out again, and is kept until its threads have ended, so that `close`
leaves none behind. Thread-safe; knows no transports.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from protocol.errors import InvalidRequest
from transfer.peer import Peer

_UNUSED_S = 300.0


class KnownPeers:
    """`met` may be read without the lock: the way of every small READ."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.met: dict[str, Peer] = {}
        self.leaving: list[Peer] = []
        """Those that were told to end, and may not have yet."""
        self.closed = False

    def meet(self, address: str, make: Callable[[], Peer]) -> Peer:
        """Raises InvalidRequest once closed, and what `make` raises, which is called at most once."""
        with self._lock:
            if self.closed:
                raise InvalidRequest("the transfer engine is closed")
            peer = self.met.get(address)
            if peer is None:
                self._drop_unused()
                peer = self.met[address] = make()
        return peer

    def forget(self, address: str) -> None:
        """Its batches fail now. Does not block."""
        with self._lock:
            self.leaving = [peer for peer in self.leaving if not peer.stopped]
            peer = self.met.pop(address, None)
            if peer is not None:
                self.leaving.append(peer)
        if peer is not None:
            peer.forget()

    def close(self) -> None:
        """Nobody is met any more; on return no thread of a peer runs. Idempotent."""
        with self._lock:
            self.closed = True
            peers = [*self.met.values(), *self.leaving]
            self.met, self.leaving = {}, []
        for peer in peers:
            peer.forget()
        for peer in peers:
            peer.join()

    def _drop_unused(self) -> None:
        """Peers that are gone leave an entry each; the lock is held."""
        before = time.monotonic() - _UNUSED_S
        for address, peer in list(self.met.items()):
            if peer.idle and peer.used_at < before:
                del self.met[address]
                peer.forget()  # whoever has got hold of it just now shall not begin
