"""The initiator's side of a connection, and the transfer of payloads over the connection itself.

Requests are pipelined up to `max_in_flight_bytes`; answers arrive in order.
"""

import json
import time
from collections import deque
from collections.abc import Callable

from moonserve.protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from moonserve.transfer.memory.data_plane import data_plane
from moonserve.transfer.memory.scatter import LOCAL, Rows
from moonserve.transfer.memory.segments import Segment, SegmentInfo
from moonserve.transfer.tcp import handshake
from moonserve.transfer.tcp.connection import Connection
from moonserve.transfer.tcp.frames import (
    HEADER_BYTES,
    Code,
    Header,
    Kind,
    ProtocolViolation,
    decode,
    encode,
    error_of,
    request,
)
from moonserve.transfer.transport_interface import STEP_S, Dial, Op, Slice, SliceSource, without_traceback

_SILENCE_S = 2.0
"""Silence after which another rail is tried: a kernel has retransmitted a lost packet a few times by then."""
_REFUSALS = (InvalidRequest, StaleLease, IntegrityError)


class StreamSession:
    """An authenticated connection to one peer over one pair of rails. Transports with a shorter data path extend it.

    Used by one thread at a time; other threads may only call `abort`.
    """

    def __init__(self, dial: Dial, connection: Connection, agreed: handshake.Agreement) -> None:
        self.connection_id = agreed.connection_id
        self._checksums = connection.seals = agreed.checksums
        self._connection = connection
        self._max_in_flight = dial.options.max_in_flight_bytes
        self._plane = data_plane()

    def alive(self) -> bool:
        return not self._connection.hung_up()

    def round_trip_s(self) -> float | None:
        return self._connection.round_trip_s()

    def abort(self) -> None:
        self._connection.abort()

    def close(self) -> None:
        self._connection.close()

    def carry_inline(self, single: Slice) -> None:
        source = _SingleSlice(single)
        self.carry(source)
        if source.error is not None:
            raise source.error

    def copy_inline(self, window: int, segment: int, local: Segment, rows: bytes | int, count: int, path: int) -> int:
        return 0

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        raise InvalidRequest("memory of another host cannot be viewed in place: READ it")

    def carry(self, slices: SliceSource) -> None:
        self._connection.deadline = slices.deadline_at
        self._connection.tick = _SilenceWatch(self._connection, slices)
        requested: deque[Slice] = deque()
        in_flight, tick_at = 0, time.monotonic() + STEP_S
        while True:
            while in_flight < self._max_in_flight and (part := slices.take()) is not None:
                if self.send_request(part, slices):
                    requested.append(part)
                    in_flight += part.nbytes + 1
            if not requested:
                return
            if (now := time.monotonic()) >= tick_at:  # also if no single wait is that long
                self._connection.check_deadline()
                tick_at = now + STEP_S
            part = requested.popleft()
            if self._settle_by(self.receive_reply, part, slices):
                in_flight -= part.nbytes + 1
            else:
                requested.append(part)

    def send_request(self, part: Slice, slices: SliceSource) -> bool:
        """Queues the request of a slice. Returns False if the slice was settled instead."""
        if part.op is Op.READ:
            header = Header(kind=Kind.READ, entries=len(part.rows), segment_id=part.segment_id)
            self._connection.queue(self.request(header, part.rows))
            return True
        if part.window_id is None:
            slices.settle(part, InvalidRequest("a WRITE needs a window"))
            return False
        self._request_write(part)
        return True

    def _request_write(self, part: Slice) -> None:
        header = Header(
            kind=Kind.WRITE,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id or 0,
            nbytes=part.nbytes,
        )
        frame = self.request(header, part.rows)
        self._connection.queue_payload(frame, part.local, part.rows, LOCAL, part.nbytes)
        if self._checksums:
            self._connection.push()  # its first bytes leave while the next request is made

    def request(self, header: Header, rows: Rows) -> bytes:
        return request(header, rows, sealed=self._checksums)

    def _settle_by(self, work: Callable[[Slice], bool], part: Slice, slices: SliceSource) -> bool:
        """Settles a slice with the outcome of `work`. Returns False if that did, because the slice has not ended."""
        try:
            if not work(part):
                return False
        except _REFUSALS as refused:
            slices.settle(part, without_traceback(refused))
        else:
            slices.settle(part, None)
        return True

    def receive_reply(self, part: Slice) -> bool:
        """Receives the answer to a slice. Returns False if another request for it was queued.

        Raises the peer's refusal, or IntegrityError.
        """
        reply = self.reply()
        if reply.entries:
            raise ProtocolViolation("a successful reply carries text")
        if part.op is Op.READ:
            if reply.nbytes != part.nbytes:
                raise ProtocolViolation("the reply has a wrong number of bytes")
            self._connection.receive_payload(part.local, part.rows, LOCAL, part.nbytes, None)
        return True

    def reply(self) -> Header:
        return self.accept(self._connection.receive_bytes(HEADER_BYTES))

    def accept(self, data: bytearray) -> Header:
        """Decodes a reply from its header. Raises the peer's refusal."""
        reply = decode(data)
        if reply.kind is not Kind.REPLY:
            raise ProtocolViolation(f"expected REPLY, received {reply.kind.name}")
        if reply.code is not Code.OK:
            if not reply.entries:
                raise ProtocolViolation("a refusal without text")
            text = self._connection.receive_bytes(reply.entries)
            raise error_of(reply.code, text.decode(errors="replace"))
        return reply

    def list_segments(self, deadline_at: float) -> list[SegmentInfo]:
        reply = self._control(Header(kind=Kind.LIST), deadline_at)
        text = self._connection.receive_bytes(reply.entries)
        try:
            return [_segment_info(**entry) for entry in json.loads(text)]
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolViolation("the peer's list of segments is unreadable") from error

    def fence(self, connection_id: int, deadline_at: float) -> None:
        self._control(Header(kind=Kind.FENCE, source_id=connection_id), deadline_at)

    def _control(self, header: Header, deadline_at: float) -> Header:
        self._connection.set_deadline(deadline_at)
        self._connection.send(encode(header))
        return self.reply()


class _SingleSlice:
    """A `SliceSource` with one slice."""

    def __init__(self, single: Slice) -> None:
        self._single = single
        self._left: Slice | None = single
        self.error: MoonserveError | None = None

    def take(self) -> Slice | None:
        single, self._left = self._left, None
        return single

    def settle(self, part: Slice, error: MoonserveError | None) -> None:
        self.error = error

    def deadline_at(self) -> float:
        return self._single.deadline_at

    def may_give_up(self) -> bool:
        return False

    def tick(self) -> None:
        """Does nothing: the deadline is enforced anyway, and `abort` ends the wait."""


class _SilenceWatch:
    """Runs the slices' `tick`, and gives up a silent connection if another path is left."""

    def __init__(self, connection: Connection, slices: SliceSource) -> None:
        self._connection = connection
        self._slices = slices
        self._num_moved = connection.num_moved()
        self._moved_at = time.monotonic()

    def __call__(self) -> None:
        self._slices.tick()
        now, num_moved = time.monotonic(), self._connection.num_moved()
        if num_moved != self._num_moved:
            self._num_moved, self._moved_at = num_moved, now
        elif now - self._moved_at > _SILENCE_S and self._slices.may_give_up():
            raise PeerLost(f"no byte was sent or received for {_SILENCE_S:g} s")


def authenticate(connection: Connection, dial: Dial) -> handshake.Agreement:
    """Connects and runs the initiator's handshake. Closes the connection on failure."""
    connection.set_deadline(dial.deadline_at)
    connection.tick = dial.while_waiting
    try:
        connection.finish_connect()
        return handshake.initiate(connection, dial.credentials, dial.address.instance, checksums=dial.options.checksums)
    except BaseException:  # also on interruption, since no caller can close it
        connection.close()
        raise


def _segment_info(
    *, segment_id: object, nbytes: object, location: object, readable: object, name: object
) -> SegmentInfo:
    """Builds a SegmentInfo from untrusted JSON. Raises TypeError or ValueError for invalid fields."""
    match segment_id, nbytes, location, readable, name:
        case int(), int(), str(), bool(), str() if segment_id >= 0 and nbytes >= 0:
            return SegmentInfo(segment_id, nbytes, location, readable, name)
    raise ValueError("not a segment")
