"""The initiator's side of rdma: slices become RDMA READs and granted RDMA WRITEs on queue pairs.

A READ is posted as soon as the segment's key is known; with checksums, the rows' checksum is requested from the target
at the same time. A WRITE first requests a grant and ends when the target reports the grant's outcome. Its rule: after
`close` the device moves no byte of the session: its pairs have failed, drained and been destroyed.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from moonserve.protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost
from moonserve.transfer.memory import scatter
from moonserve.transfer.memory.scatter import LOCAL, REMOTE
from moonserve.transfer.rdma import control_messages
from moonserve.transfer.rdma.control_messages import MAX_GRANTS, RemoteKey
from moonserve.transfer.rdma.device import Completion
from moonserve.transfer.rdma.memory_regions import DeviceRail
from moonserve.transfer.rdma.queue_pairs import CompletionWaiter, QueuePairSet, SendQueue, SliceWork, runs_of
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import HEADER_BYTES, Code, Header, Kind, ProtocolViolation, decode, encode, error_of
from moonserve.transfer.tcp.handshake import Agreement
from moonserve.transfer.tcp.session import StreamSession
from moonserve.transfer.transport_interface import STEP_S, Dial, Op, Slice, SliceSource, without_traceback

QUEUE_PAIRS: Final = 2
"""Queue pairs per session. One fills a 100 Gb/s link; more spread the work on devices with several engines."""
_MIN_IN_FLIGHT_BYTES = 64 << 20
"""A write needs a round trip for its grant before its first byte leaves. This covers enough slices to keep the pairs
busy."""
_DRAIN_S = 0.5


@dataclass(slots=True, eq=False)
class _Flight:
    """A slice in flight."""

    part: Slice
    queue: int
    """Index of the pair that carries it."""
    local_key: int
    num_waits: int = 0
    """Number of answers and completions still to come."""
    error: MoonserveError | None = None
    checksum: int = 0
    """Checksum of a READ, as the target reported it."""
    posted: bool = False


class RdmaSession(StreamSession):
    """A session over queue pairs and a TCP connection. Owns both; the rail is shared."""

    def __init__(self, dial: Dial, connection: Connection, agreed: Agreement, rail: DeviceRail) -> None:
        super().__init__(dial, connection, agreed)
        self._rail = rail
        self._max_in_flight = max(self._max_in_flight, _MIN_IN_FLIGHT_BYTES)
        self._pairs = QueuePairSet(rail, QUEUE_PAIRS, serves=False)
        self._queues: list[SendQueue[_Flight]] = [
            SendQueue(pair, number + 1, self._pairs.send_depth) for number, pair in enumerate(self._pairs.pairs)
        ]
        self._waiter = CompletionWaiter(connection.descriptor, self._pairs.completions)
        self._keys: dict[int, RemoteKey] = {}
        self._requested: deque[_Flight] = deque()
        """Slices whose replies are due, in this order."""
        self._granted: dict[int, _Flight] = {}
        self._num_flights = 0
        self._in_flight = 0
        self._next_queue = 0
        self._tick_at = 0.0
        self._is_broken = False

    def connect_pairs(self) -> None:
        """Connects the queue pairs with the target's. Raises PeerLost."""
        try:
            header = Header(kind=Kind.CONNECT, entries=len(self._pairs.pairs))
            self._connection.send(encode(header) + self._pairs.addresses())
            peers = self._connection.receive_bytes(self.reply().entries)
            self._pairs.connect(control_messages.unpack_pairs(peers, self._rail.device.limits))
        except BaseException:  # no caller can close it yet
            self.close()
            raise

    def alive(self) -> bool:
        return not self._is_broken and super().alive()

    def close(self) -> None:
        if self._num_flights:
            self._drain()
        self._pairs.close()
        super().close()

    def carry(self, slices: SliceSource) -> None:
        self._connection.deadline = slices.deadline_at
        self._connection.tick = slices.tick
        self._tick_at = time.monotonic() + STEP_S
        try:
            while self._begin_more(slices):
                self._advance(slices)
        except MoonserveError:
            self._is_broken = True
            raise

    def _begin_more(self, slices: SliceSource) -> bool:
        """Starts slices up to the limits. Returns False if nothing is in flight any more."""
        while self._in_flight < self._max_in_flight and self._num_flights < MAX_GRANTS:
            part = slices.take()
            if part is None:
                break
            self._begin(part, slices)
        self._connection.flush()
        return self._num_flights > 0

    def _advance(self, slices: SliceSource) -> None:
        completions, readable = self._waiter.wait(STEP_S)
        for completion in completions:
            self._completed(completion, slices)
        if readable:
            self._take_frame(slices)
        if (now := time.monotonic()) >= self._tick_at:
            self._tick_at = now + STEP_S
            self._connection.check_deadline()

    def _begin(self, part: Slice, slices: SliceSource) -> None:
        if part.op is Op.WRITE and part.window_id is None:
            slices.settle(part, InvalidRequest("a WRITE needs a window"))
            return
        flight = _Flight(part, self._next_queue, self._rail.memory.own(part.local).local_key)
        self._next_queue = (self._next_queue + 1) % len(self._queues)
        self._num_flights += 1
        self._in_flight += part.nbytes
        if part.op is Op.WRITE:
            self._request_grant(flight)
        else:
            self._begin_read(flight, slices)

    def _begin_read(self, flight: _Flight, slices: SliceSource) -> None:
        part = flight.part
        key = self._keys.get(part.segment_id)
        if key is None or self._checksums:
            rows = part.rows if self._checksums else part.rows[:0]
            header = Header(kind=Kind.KEY, entries=len(rows), segment_id=part.segment_id)
            self._send_request(flight, self.request(header, rows))
        if key is not None:
            flight.error = self._post_read(flight, key)
            self._settle_if_ended(flight, slices)

    def _request_grant(self, flight: _Flight) -> None:
        part = flight.part
        header = Header(
            kind=Kind.GRANT,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id or 0,
            source_id=flight.queue,
            nbytes=part.nbytes,
            checksum=scatter.checksum(part.local.buffer, part.rows, LOCAL) if self._checksums else 0,
        )
        self._send_request(flight, self.request(header, part.rows))

    def _send_request(self, flight: _Flight, frame: bytes) -> None:
        flight.num_waits += 1
        self._requested.append(flight)
        self._connection.queue(frame)

    def _take_frame(self, slices: SliceSource) -> None:
        header = decode(self._connection.receive_bytes(HEADER_BYTES))
        body = self._connection.receive_bytes(header.entries)
        error = None
        if header.code is not Code.OK:
            error = without_traceback(error_of(header.code, body.decode(errors="replace")))
        if header.kind is Kind.RESULT and header.source_id in self._granted:
            flight = self._granted.pop(header.source_id)
        elif header.kind is Kind.REPLY and self._requested:
            flight = self._requested.popleft()
            if error is None:
                error = self._use_key(flight, header, body)
        else:
            raise ProtocolViolation(f"unexpected {header.kind.name}")
        flight.error = flight.error or error
        flight.num_waits -= 1
        self._settle_if_ended(flight, slices)

    def _use_key(self, flight: _Flight, header: Header, body: bytearray) -> MoonserveError | None:
        """Handles a reply with a key by posting the requests that it allows. Returns an error of the slice, if any."""
        key = control_messages.unpack_key(header, body)
        if flight.part.op is Op.WRITE:
            self._granted[header.source_id] = flight
            flight.num_waits += 1
            self._post(flight, key, header.source_id)
            return None
        flight.checksum = header.checksum
        self._keys[flight.part.segment_id] = key
        return None if flight.posted else self._post_read(flight, key)

    def _post_read(self, flight: _Flight, key: RemoteKey) -> MoonserveError | None:
        flight.posted = True
        try:
            scatter.require_inside(flight.part.rows, REMOTE, key.nbytes)
        except InvalidRequest as error:
            return without_traceback(error)
        self._post(flight, key, None)
        return None

    def _post(self, flight: _Flight, key: RemoteKey, grant: int | None) -> None:
        part, limit = flight.part, self._rail.device.limits.max_message_bytes
        runs = runs_of(part.rows, key.address, part.local.base, limit)
        if grant is not None and not runs:
            runs = [(key.address, part.local.base, 0)]  # an empty write still has to end the grant
        if runs:
            flight.num_waits += 1
            work = SliceWork(flight, part.op, runs, flight.local_key, key.key, grant)
            self._queues[flight.queue].submit(work)

    def _completed(self, completion: Completion, slices: SliceSource) -> None:
        if completion.failure is not None:
            raise PeerLost(f"rdma: a request ended with {completion.failure!r}")
        work = self._queues[completion.token - 1].completed()
        if work is not None:
            work.owner.num_waits -= 1
            self._settle_if_ended(work.owner, slices)

    def _settle_if_ended(self, flight: _Flight, slices: SliceSource) -> None:
        if flight.num_waits:
            return
        part = flight.part
        self._num_flights -= 1
        self._in_flight -= part.nbytes
        slices.settle(part, flight.error or self._corrupt(flight))

    def _corrupt(self, flight: _Flight) -> IntegrityError | None:
        part = flight.part
        if part.op is Op.WRITE or not self._checksums:
            return None  # the target verifies WRITEs
        if scatter.checksum(part.local.buffer, part.rows, LOCAL) == flight.checksum:
            return None
        return IntegrityError(f"{part.nbytes} bytes read arrived with a wrong checksum")

    def _drain(self) -> None:
        """Waits for posted chains to end, for a bounded time: destroying the pairs ends them for certain."""
        self._pairs.fail()
        num_chains = sum(queue.give_up() for queue in self._queues)
        until = time.monotonic() + _DRAIN_S
        while num_chains and time.monotonic() < until:
            num_chains -= sum(each.token > 0 for each in self._waiter.completions(STEP_S))
