"""The transfer engine of one process: its memory, its windows, its listeners, its peers."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from protocol.errors import ConfigError, InvalidRequest
from transfer import plan, registry
from transfer.address import Address, host_identity
from transfer.base import Credentials, Hosted, Listener, Transfer
from transfer.batch import Batch
from transfer.faults import FaultPlan
from transfer.handshake import INSTANCE_BYTES
from transfer.peer import Job, Peer
from transfer.segments import Segment, SegmentTable
from transfer.windows import WindowTable

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class TransferEngine:
    """One-sided READ and WRITE between registered segments of authenticated processes.

    All methods are thread-safe. `address` is what peers need; it is valid after `start` and for this
    incarnation of the process only.
    """

    def __init__(
        self,
        *,
        cluster_token: str,
        host: str = "127.0.0.1",
        transports: Sequence[str] = ("shm", "tcp"),
        faults: FaultPlan | None = None,
    ) -> None:
        """Raises ConfigError for an empty token or unknown transports."""
        if not cluster_token:
            raise ConfigError("the cluster token is empty")
        self._host = host
        self._transports = registry.make(transports)
        self._faults = faults or FaultPlan()
        credentials = Credentials(cluster_token.encode(), secrets.token_bytes(INSTANCE_BYTES))
        self._hosted = Hosted(credentials, SegmentTable(), WindowTable())
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._retired: list[Peer] = []
        """Peers that were told to end, and may not have yet."""
        self._closed = False
        self.address = ""

    def __enter__(self) -> TransferEngine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listens on every configured transport. Raises ConfigError when that is impossible."""
        try:
            endpoints: dict[str, str] = {}
            for transport in self._transports:
                listener = transport.listen(self._host, self._hosted)
                self._listeners.append(listener)
                endpoints[transport.name] = listener.endpoint
        except ConfigError:
            self.close()
            raise
        instance = self._hosted.credentials.instance
        self.address = str(Address(instance, host_identity(), endpoints))

    def close(self) -> None:
        """Fails what is under way, ends every thread, gives back every descriptor. Idempotent."""
        with self._lock:
            self._closed = True
            peers = [*self._peers.values(), *self._retired]
            self._peers, self._retired = {}, []
        for peer in peers:
            peer.forget()
        for peer in peers:
            peer.join()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        self._hosted.windows.close_all()
        self._hosted.segments.close()

    def allocate(self, nbytes: int, location: str = "cpu:0", *, readable: bool = False) -> Segment:
        """New zeroed memory that peers on this host can map; all its pages are present."""
        return self._hosted.segments.allocate(nbytes, location, readable=readable)

    def register(
        self, buffer: WriteableBuffer, location: str = "cpu:0", *, readable: bool = False
    ) -> Segment:
        """The caller's memory: writable, contiguous. Peers on this host reach it without mapping."""
        return self._hosted.segments.register(buffer, location, readable=readable)

    def deregister(self, segment: Segment) -> None:
        """Raises InvalidRequest while a batch or an open window uses it."""
        self._hosted.segments.deregister(segment)

    def open_window(self, segment: Segment, ranges: Sequence[tuple[int, int]]) -> int:
        """Lets peers WRITE these (offset, length) ranges of the segment; ids are never reused."""
        self._hosted.segments.hold([segment])
        try:
            return self._hosted.windows.open(segment, ranges)
        except InvalidRequest:
            self._hosted.segments.release([segment])
            raise

    def close_window(self, window_id: int) -> None:
        """On return no write under it is under way and later ones are refused. Idempotent."""
        segment = self._hosted.windows.close(window_id)
        if segment is not None:
            self._hosted.segments.release([segment])

    def submit(self, transfers: Sequence[Transfer], *, deadline_s: float) -> Batch:
        """Returns at once; the batch ends within `deadline_s` (and a scheduling delay).

        Batches are unordered. Transfers must not overlap in their destinations. Raises InvalidRequest
        for a local segment that is not registered here, or a closed engine.
        """
        deadline_at = time.monotonic() + deadline_s
        segments = self._hosted.segments
        transfers = tuple(transfers)
        used = {transfer.local for transfer in transfers}
        parts = plan.by_address(transfers)
        segments.hold(used)
        batch = Batch(len(transfers), len(parts), lambda: segments.release(used))
        with self._lock:
            if self._closed:
                segments.release(used)
                raise InvalidRequest("the transfer engine is closed")
            for address, indices in parts.items():
                self._peer(address).put(Job(transfers, indices, deadline_at, batch))
        return batch

    def forget(self, address: str) -> None:
        """The peer is known to be dead: its batches fail with PeerLost now. Does not block."""
        with self._lock:
            self._drop_finished()
            peer = self._peers.pop(address, None)
            if peer is not None:
                self._retired.append(peer)
        if peer is not None:
            peer.forget()

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(
                address,
                transports=self._transports,
                credentials=self._hosted.credentials,
                faults=self._faults,
                may_retire=self._may_retire,
            )
        return peer

    def _may_retire(self, peer: Peer) -> bool:
        with self._lock:
            if not peer.idle:
                return False
            if self._peers.get(peer.address) is peer:
                del self._peers[peer.address]
            return True

    def _drop_finished(self) -> None:
        self._retired = [peer for peer in self._retired if peer.running]
