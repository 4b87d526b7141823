"""The target's side of rdma: it owns the remote memory, sends keys, grants writes and reports their outcomes.

Its rule: a grant holds its window until the peer's last packet has arrived and is verified, or until the queue pairs
are gone. Closing the window revokes the grant, which fails the pairs. The device moves the bytes, so bytes are stored
only inside what was granted, by a peer that proved to be an engine of the cluster.
"""

import threading
from dataclasses import dataclass

from moonserve.protocol.errors import IntegrityError, MoonserveError, PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.scatter import REMOTE, Rows
from moonserve.transfer.memory.segments import Segment
from moonserve.transfer.memory.write_windows import WindowHold
from moonserve.transfer.rdma import control_messages
from moonserve.transfer.rdma.control_messages import MAX_GRANTS, MAX_PAIRS, RemoteKey
from moonserve.transfer.rdma.device import Completion
from moonserve.transfer.rdma.memory_regions import DeviceRail
from moonserve.transfer.rdma.queue_pairs import CompletionWaiter, QueuePairSet
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import (
    HEADER_BYTES,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    receive_rows,
    refusal,
)
from moonserve.transfer.tcp.target import StreamTarget
from moonserve.transfer.transport_interface import ServedState

_RECEIVE = 1
"""Token of a receive; its immediate value identifies the grant."""
_END_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """A write that the peer is currently allowed to do."""

    hold: WindowHold
    segment: Segment
    rows: Rows
    checksum: int


class RdmaTarget(StreamTarget):
    """Serves one connection and its queue pairs."""

    def __init__(self, connection: Connection, state: ServedState, rail: DeviceRail) -> None:
        super().__init__(connection, state)
        self._rail = rail
        self._pairs: QueuePairSet | None = None
        self._grants: dict[int, _Grant] = {}
        self._next_grant = 1
        self._ended = threading.Event()

    def serve(self) -> None:
        pairs = self._connect_pairs()
        waiter = CompletionWaiter(self.connection.descriptor, pairs.completions)
        while True:
            completions, readable = waiter.wait(None)
            for completion in completions:
                self._completed(completion)
            if readable:
                self.next_request()
            self.connection.flush()

    def close(self) -> None:
        if self._pairs is not None:
            self._pairs.fail()
            self._pairs.close()
        for grant in self._grants.values():
            grant.hold.release()
        self._rail.memory.forget(self)
        self._ended.set()

    def end(self) -> None:
        """Ends the connection because a segment is being deregistered. Called from another thread."""
        self._revoke()
        self._ended.wait(_END_S)

    def _revoke(self) -> None:
        """Wakes the serving thread to end the connection, and stops all stores of the peer. May be called from any
        thread."""
        self.connection.abort()
        if self._pairs is not None:
            self._pairs.fail()

    def _connect_pairs(self) -> QueuePairSet:
        header = decode(self.idle_receive(HEADER_BYTES))
        if header.kind is not Kind.CONNECT or not 1 <= header.entries <= MAX_PAIRS:
            raise ProtocolViolation("expected CONNECT with queue pairs")
        data = self.connection.receive_bytes(header.entries * control_messages.PAIR_BYTES)
        peers = control_messages.unpack_pairs(data, self._rail.device.limits)
        self._pairs = pairs = QueuePairSet(self._rail, len(peers), serves=True)
        pairs.connect(peers)
        addresses = pairs.addresses()
        reply = encode(Header(kind=Kind.REPLY, entries=len(addresses)))
        self.connection.send(reply + addresses)
        return pairs

    def dispatch(self, header: Header) -> None:
        match header.kind:
            case Kind.KEY:
                self._send_key(header)
            case Kind.GRANT:
                self._grant(header)
            case _:
                super().dispatch(header)

    def _send_key(self, header: Header) -> None:
        rows = receive_rows(self.connection, header, sealed=self.checksums)
        try:
            segment = self.readable(header.segment_id)
            scatter.require_inside(rows, REMOTE, segment.nbytes)
            region = self._rail.memory.readable(segment, self)
        except MoonserveError as error:
            self.connection.queue(refusal(error))
            return
        key = RemoteKey(region.remote_key, segment.base, segment.nbytes)
        checksum = scatter.checksum(segment.buffer, rows, REMOTE) if len(rows) else 0
        self.connection.queue(control_messages.key_reply(key, checksum=checksum))

    def _grant(self, header: Header) -> None:
        rows = self.rows_to_write(header)
        assert self._pairs is not None
        if header.source_id >= len(self._pairs.pairs) or len(self._grants) >= MAX_GRANTS:
            raise ProtocolViolation("no such queue pair, or too many grants")
        try:
            window = self.window_for(header, rows)
            region = self._rail.memory.writable(window.segment, self)
            hold = window.hold(self._revoke)
        except MoonserveError as error:
            self.connection.queue(refusal(error))
            return
        number, self._next_grant = self._next_grant, self._next_grant % 0xFFFF_FFFF + 1
        self._grants[number] = _Grant(hold, window.segment, rows, header.checksum)
        self._pairs.pairs[header.source_id].receive(_RECEIVE)
        key = RemoteKey(region.remote_key, window.segment.base, window.segment.nbytes)
        self.connection.queue(control_messages.key_reply(key, grant=number))

    def _completed(self, completion: Completion) -> None:
        if completion.failure is not None:
            raise PeerLost(f"rdma: a receive ended with {completion.failure!r}")
        number = completion.immediate or 0
        grant = self._grants.pop(number, None)
        if grant is None:
            raise ProtocolViolation("a write used an unknown grant")
        error = self._corrupt(grant)
        grant.hold.release()
        self.connection.queue(control_messages.result(number, error))

    def _corrupt(self, grant: _Grant) -> IntegrityError | None:
        if not self.checksums:
            return None
        if scatter.checksum(grant.segment.buffer, grant.rows, REMOTE) == grant.checksum:
            return None
        nbytes = scatter.total(grant.rows)
        return IntegrityError(f"{nbytes} bytes written arrived with a wrong checksum")
