"""The initiator's side of a connection, and the transfer of payloads over the connection itself.

Requests are pipelined up to `max_in_flight_bytes`; answers arrive in order.
"""

from __future__ import annotations

import json
import time
from collections import deque

from protocol.errors import IntegrityError, InvalidRequest, MoonserveError, PeerLost, StaleLease
from transfer import scatter
from transfer.base import Dial, Feed, Op, Slice, Transfer
from transfer.native import data_plane
from transfer.scatter import LOCAL, Rows
from transfer.segments import Segment, SegmentInfo
from transfer.tcp import handshake
from transfer.tcp.connection import STEP_S, Connection
from transfer.tcp.frames import (
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

_SILENCE_S = 2.0
"""Silence after which another rail is tried: a kernel has retransmitted a lost packet a few times by then."""
_REFUSALS = (InvalidRequest, StaleLease, IntegrityError)


class StreamSession:
    """An authenticated connection to one peer over one pair of rails. Transports with a shorter data path extend it.

    Used by one thread at a time; other threads may only call `abort`.
    """

    def __init__(self, dial: Dial, connection: Connection, agreed: handshake.Agreement) -> None:
        self.connection_id = agreed.connection_id
        """Identifies this session at the target, for `fence`."""
        self._checksums = agreed.checksums
        self._connection = connection
        self._max_in_flight = dial.options.max_in_flight_bytes
        self._plane = data_plane()

    def alive(self) -> bool:
        """Returns False if the peer is known to be gone. Does not wait."""
        return not self._connection.hung_up()

    def abort(self) -> None:
        self._connection.abort()

    def close(self) -> None:
        self._connection.close()

    def read_here(self, transfer: Transfer, deadline_at: float) -> bool:
        """Executes one READ in the caller's thread while nothing else is in flight. Returns False if `carry` must be
        used.

        Raises the errors that `carry` raises or settles slices with.
        """
        return False

    def view(self, segment_id: int, offset: int, length: int, deadline_at: float) -> memoryview:
        """Returns a read-only view of the peer's memory in place, mapped for as long as the view is held.

        Raises InvalidRequest if the memory cannot be mapped, and PeerLost.
        """
        raise InvalidRequest("memory of another host cannot be viewed in place: READ it")

    def carry(self, feed: Feed) -> None:
        """Carries slices, several at once, until `feed` has none and all taken ones are settled.

        Raises PeerLost (or another error that is not the peer's refusal) if the session breaks or a slice's deadline
        passes. The caller then closes the session; after `close` no byte of an unsettled slice can reach local memory.
        """
        self._connection.deadline = feed.deadline_at
        self._connection.look_up = _Watch(self._connection, feed)
        asked: deque[Slice] = deque()
        in_flight, look_up_at = 0, time.monotonic() + STEP_S
        while True:
            while in_flight < self._max_in_flight and (part := feed.take()) is not None:
                if self.ask(part, feed):
                    asked.append(part)
                    in_flight += part.nbytes + 1
            if not asked:
                return
            if (now := time.monotonic()) >= look_up_at:  # also if no single wait is that long
                self._connection.keep_time()
                look_up_at = now + STEP_S
            part = asked.popleft()
            if self._finish(part, feed):
                in_flight -= part.nbytes + 1
            else:
                asked.append(part)

    def ask(self, part: Slice, feed: Feed) -> bool:
        """Queues the request of a slice. Returns False if the slice was settled instead."""
        if part.op is Op.READ:
            header = Header(kind=Kind.READ, entries=len(part.rows), segment_id=part.segment_id)
            self._connection.queue(self.request(header, part.rows))
            return True
        if part.window_id is None:
            feed.settle(part, InvalidRequest("a WRITE needs a window"))
            return False
        self._ask_write(part)
        return True

    def _ask_write(self, part: Slice) -> None:
        payload = self._plane.iovecs(part.local.base, part.rows, column=LOCAL)
        checksum = 0
        if self._checksums:
            checksum = scatter.checksum(part.local.buffer, part.rows, LOCAL)
        header = Header(
            kind=Kind.WRITE,
            entries=len(part.rows),
            segment_id=part.segment_id,
            window_id=part.window_id or 0,
            nbytes=part.nbytes,
            checksum=checksum,
        )
        self._connection.queue(self.request(header, part.rows), payload, (part, payload))
        if self._checksums:
            self._connection.push()  # send it now, while it is cached and the next slice is hashed

    def request(self, header: Header, rows: Rows) -> bytes:
        return request(header, rows, sealed=self._checksums)

    def _finish(self, part: Slice, feed: Feed) -> bool:
        """Takes the answer to the oldest request. Returns False if the slice was requested again."""
        try:
            if not self.answer(part):
                return False
        except _REFUSALS as refused:
            feed.settle(part, without_frames(refused))
        else:
            feed.settle(part, None)
        return True

    def answer(self, part: Slice) -> bool:
        """Receives the answer to a slice. Returns False if another request for it was queued.

        Raises the peer's refusal, or IntegrityError.
        """
        reply = self.reply()
        if reply.entries:
            raise ProtocolViolation("a reply with text that is no refusal")
        if part.op is Op.READ:
            self.receive_payload(part.local, part.rows, part.nbytes, reply)
        return True

    def receive_payload(self, local: Segment, rows: Rows, nbytes: int, reply: Header) -> None:
        """Receives a payload into local memory. Raises IntegrityError if its checksum differs from the sender's."""
        if reply.nbytes != nbytes:
            raise ProtocolViolation("the peer answers with another number of bytes")
        self._connection.receive_vectors(self._plane.iovecs(local.base, rows, column=LOCAL))
        if self._checksums and scatter.checksum(local.buffer, rows, LOCAL) != reply.checksum:
            raise IntegrityError(f"{nbytes} bytes read arrived with another checksum")

    def reply(self) -> Header:
        return self.accept(self._connection.receive_short(HEADER_BYTES))

    def accept(self, data: bytearray) -> Header:
        """Decodes a reply from its header. Raises the peer's refusal."""
        reply = decode(data)
        if reply.kind is not Kind.REPLY:
            raise ProtocolViolation(f"a reply was due, {reply.kind.name} came")
        if reply.code is not Code.OK:
            if not reply.entries:
                raise ProtocolViolation("a refusal without words")
            text = self._connection.receive_bytes(reply.entries)
            raise error_of(reply.code, text.decode(errors="replace"))
        return reply

    def list_segments(self, deadline_at: float) -> list[SegmentInfo]:
        """Returns the peer's readable segments. Raises PeerLost."""
        reply = self._control(Header(kind=Kind.LIST), deadline_at)
        text = self._connection.receive_bytes(reply.entries)
        try:
            return [_segment_info(**entry) for entry in json.loads(text)]
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolViolation("the peer's list of segments is unreadable") from error

    def fence(self, connection_id: int, deadline_at: float) -> None:
        """Makes the peer end an earlier connection. On return nothing of it is served any more. Raises PeerLost."""
        self._control(Header(kind=Kind.FENCE, source_id=connection_id), deadline_at)

    def _control(self, header: Header, deadline_at: float) -> Header:
        self._connection.set_deadline(deadline_at)
        self._connection.send(encode(header))
        return self.reply()


class _Watch:
    """Runs the feed's `look_up`, and gives up a silent connection if another path is left."""

    def __init__(self, connection: Connection, feed: Feed) -> None:
        self._connection = connection
        self._feed = feed
        self._num_moved = connection.num_moved()
        self._moved_at = time.monotonic()

    def __call__(self) -> None:
        self._feed.look_up()
        now, num_moved = time.monotonic(), self._connection.num_moved()
        if num_moved != self._num_moved:
            self._num_moved, self._moved_at = num_moved, now
        elif now - self._moved_at > _SILENCE_S and self._feed.may_give_up():
            raise PeerLost(f"not a byte came or went for {_SILENCE_S:g} s")


def authenticate(connection: Connection, dial: Dial) -> handshake.Agreement:
    """Connects and runs the initiator's handshake. Closes the connection on failure."""
    connection.set_deadline(dial.deadline_at)
    connection.look_up = dial.while_waiting
    try:
        connection.finish_connect()
        return handshake.initiate(
            connection,
            dial.credentials,
            dial.address.instance,
            checksums=dial.options.checksums,
        )
    except BaseException:  # also on interruption, since no caller can close it
        connection.close()
        raise


def without_frames(error: MoonserveError) -> MoonserveError:
    """Strips tracebacks from an error, which outlives its batch: their frames would keep the memory alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _segment_info(
    *, segment_id: object, nbytes: object, location: object, readable: object, name: object
) -> SegmentInfo:
    """Builds a SegmentInfo from untrusted JSON. Raises TypeError or ValueError for invalid fields."""
    match segment_id, nbytes, location, readable, name:
        case int(), int(), str(), bool(), str() if segment_id >= 0 and nbytes >= 0:
            return SegmentInfo(segment_id, nbytes, location, readable, name)
    raise ValueError("not a segment")
