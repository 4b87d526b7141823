"""Small batches in one round trip with a node (`kvstore.express`): the client's end.

Its rule: only bytes that match the checksum count, as for every read of memory that is not mapped here; what did not
come along is told apart by a `Fate` or an entry, and left to the ways that always work. A connection on which anything
went wrong is closed. Knows one node.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.client.deadline import Deadline
from kvstore.client.fate import Fate
from kvstore.client.spots import Spots, Words
from kvstore.express import frames
from kvstore.express.arriving import checksums_on_arrival
from kvstore.express.frames import ANSWER, CHECKSUM, Kind, Put, Status
from kvstore.express.link import SPIN_NS, Link, millis
from kvstore.native.base import NO_RECORD, Entry
from kvstore.native.lookups import Standing
from protocol.errors import Incompatible, MoonserveError, Overloaded, PeerLost
from protocol.failures import failure_from_wire
from protocol.keys import NO_PARENT, BlockKey
from protocol.lean.frames import MAX_MESSAGE_BYTES
from protocol.pb import common_pb2
from transfer import Segment
from transfer.native import IoVectors, address_of, vectors

EXIST_KEYS = 4096
GET_BYTES = 4 * 2**20
PUT_BYTES = 4 * 2**20
"""More than that in a call goes by the transfer engine, which cuts it and spreads it over streams."""
_MAX_FAILURE_BYTES = min(MAX_MESSAGE_BYTES, 1 << 20)

_SENT = Standing.SENT << 32
_MISSING, _UNKNOWN = int(Standing.MISSING), int(Standing.UNKNOWN)
Found = int | Entry | Fate
"""The length of what lies in its spot now; where an object lies that did not come along; or neither."""


class NotOffered(Exception):
    """The node speaks no express, or has no place for another connection."""


class Express:
    """Thread-safe: a connection for each call at once. `close` it; calls under way close theirs."""

    def __init__(self, dial: Callable[[float], socket.socket]) -> None:
        """`dial` connects within seconds. Raises what a call may raise; Incompatible, Overloaded: not offered."""
        self._dial = dial
        self._idle: deque[Link] = deque()
        self._lock = threading.Lock()
        self._num_used = 0
        self._closed = False

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def get(self, keys: Sequence[BlockKey], spots: Spots, deadline: Deadline) -> list[Found]:
        """Reads what has room into its spot, up to `GET_BYTES`. Raises NotOffered, PeerLost, DeadlineExceeded."""
        with self._link(deadline) as link:
            asked = _asked(link, keys, spots.rooms, deadline)
            expected = _Landing.full(spots)  # while the node looks them up
            told = asked.answer()
            if told.is_all_of(spots.rooms):
                return told.all_found(expected.land(asked), expected.lengths)
            return told.found(_Landing(spots, told.lengths).land(asked))

    def exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool | Fate]:
        """A get with no room for anything: only what the node says. ASK where it cannot tell. Raises as `get`."""
        left_s, count = deadline.left_s(), len(keys)
        head = frames.question(Kind.GET, count, millis(left_s), 0)
        message = b"".join((head, *keys, bytes(8 * count)))
        answer = frames.answer_room(count)
        with self._link(deadline) as link:
            link.say(message)
            link.receive(vectors((address_of(answer), len(answer))))
            link.pump(time.monotonic() + left_s)
            _check_head(answer)
        standings = (row[1] >> 32 for row in frames.rows_in(answer, count).tolist())
        return [
            Fate.ASK if standing == _UNKNOWN else standing != _MISSING for standing in standings
        ]

    def get_packed(
        self, keys: Sequence[BlockKey], local: Segment, deadline: Deadline
    ) -> tuple[list[Found], Spots]:
        """As `get`, whatever their lengths are, back to back into `local`, which has room for `GET_BYTES`."""
        rooms = np.full(len(keys), frames.NOT_LIMITED, np.uint64)
        with self._link(deadline) as link:
            asked = _asked(link, keys, rooms, deadline)
            told = asked.answer()
            spots = Spots.packed(local, told.lengths)
            return told.found(_Landing(spots, told.lengths).land(asked)), spots

    def put(
        self,
        wishes: Sequence[tuple[BlockKey, BlockKey | None]],
        values: Sequence[memoryview],
        checksum_of: Callable[[int], int],
        deadline: Deadline,
        *,
        pin: int,
        tenant: bytes,
    ) -> list[Put]:
        """Stores each value under its key, behind its parent; `checksum_of` is asked while the bytes travel.

        Raises what the node raises; NotOffered, PeerLost, DeadlineExceeded. Nothing is under way when it has raised.
        """
        count, left_s = len(values), deadline.left_s()
        lengths = [len(value) for value in values]
        head = frames.question(
            Kind.PUT, count, millis(left_s), sum(lengths), pin=pin, tenant=tenant
        )
        keys, parents = zip(*wishes, strict=True)
        rows = frames.wishes(keys, [parent or NO_PARENT for parent in parents], lengths)
        message = b"".join((head, rows, tenant))
        give_up_at = time.monotonic() + left_s
        with self._link(deadline) as link:
            link.say(message)  # the node looks for space while the values follow
            link.send(vectors(*((address_of(value), len(value)) for value in values if len(value))))
            link.push()
            checksums = np.array([checksum_of(place) for place in range(count)], CHECKSUM)
            link.send(vectors((address_of(checksums), checksums.nbytes)))
            outcomes = _outcomes(link, count, give_up_at)
        if isinstance(outcomes, MoonserveError):
            raise outcomes
        return outcomes

    def _link(self, deadline: Deadline) -> _Using:
        """A connection, for as long as it is used; closed when anything was raised meanwhile."""
        return _Using(self._take(deadline), self._begin, self._end)

    def _begin(self, link: Link) -> None:
        with self._lock:
            self._num_used += 1
            # Several threads that spin would only take time from each other.
            link.spin_ns = SPIN_NS if self._num_used == 1 else 0

    def _end(self, link: Link, good: bool) -> None:
        with self._lock:
            self._num_used -= 1
            if good and not self._closed:
                self._idle.append(link)
            else:
                link.close()

    def _take(self, deadline: Deadline) -> Link:
        """The connection used last, since its memory is the warmest, or a new one."""
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                break
            if link.is_quiet():
                return link
            link.close()
        try:
            return Link(self._dial(deadline.left_s()))
        except (Incompatible, Overloaded) as error:
            raise NotOffered from error
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error


class _Using:
    """A generator in its place would be one of the dearest lines of a small call."""

    __slots__ = ("_begin", "_end", "_link")

    def __init__(
        self, link: Link, begin: Callable[[Link], None], end: Callable[[Link, bool], None]
    ) -> None:
        self._link, self._begin, self._end = link, begin, end

    def __enter__(self) -> Link:
        self._begin(self._link)
        return self._link

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(self._link, kind is None)


def _asked(link: Link, keys: Sequence[BlockKey], rooms: Words, deadline: Deadline) -> _Asked:
    """On its way. Raises DeadlineExceeded."""
    left_s = deadline.left_s()
    head = frames.question(Kind.GET, len(keys), millis(left_s), GET_BYTES)
    link.say(b"".join((head, *keys, rooms.tobytes())))
    return _Asked(link, len(keys), time.monotonic() + left_s)


class _Asked:
    """A get that the node is working on."""

    def __init__(self, link: Link, count: int, give_up_at: float) -> None:
        self.link, self.give_up_at = link, give_up_at
        self._count = count

    def answer(self) -> _Told:
        """Raises PeerLost for a failure: gets have none but those of the node itself."""
        link, answer = self.link, frames.answer_room(self._count)
        end = link.received + len(answer)
        link.receive(vectors((address_of(answer), len(answer))), ANSWER.size)
        link.pump(self.give_up_at)
        _check_head(answer)
        if link.received < end:
            link.wait_for(end)
            link.pump(self.give_up_at)
        return _Told(frames.rows_in(answer, self._count))


class _Told:
    """What the node's rows say: offset, length and standing, checksum, generation of each."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows
        self._extents = rows[:, 1]

    def is_all_of(self, rooms: Words) -> bool:
        """Everything comes along, and fills its room: nearly always so."""
        return bool((self._extents == rooms + _SENT).all())

    @property
    def lengths(self) -> list[int]:
        """Of what comes along; 0 for the others."""
        return [
            extent - _SENT if extent >> 32 == Standing.SENT else 0
            for extent in self._extents.tolist()
        ]

    def all_found(self, arrived: Sequence[int], lengths: Sequence[int]) -> list[Found]:
        """As `found`, when all of them were to come along."""
        return list(lengths) if arrived == self._rows[:, 2].tolist() else self.found(arrived)

    def found(self, arrived: Sequence[int]) -> list[Found]:
        """By the checksums of what has come, of which some may stand for nothing."""
        rows: list[list[int]] = self._rows.tolist()
        return [_found(row, checksum) for row, checksum in zip(rows, arrived, strict=True)]


def _found(row: Sequence[int], arrived: int) -> Found:
    offset, extent, checksum, generation = row
    standing, length = frames.standing_and_length(extent)
    if standing == Standing.SENT:
        return length if arrived == checksum else Fate.ASK
    if standing == Standing.IN_MEMORY:
        return Entry(NO_RECORD, generation, checksum, length, offset)
    return Fate.ABSENT if standing == Standing.MISSING else Fate.ASK


class _Landing:
    """Where the bytes of an answer go."""

    def __init__(self, spots: Spots, lengths: Sequence[int]) -> None:
        """Raises PeerLost for more than there is room for."""
        self.lengths = lengths
        self._pieces: IoVectors = np.empty((len(lengths), 2), np.uint64)
        self._pieces[:, 0], self._pieces[:, 1] = spots.addresses, lengths
        if (self._pieces[:, 1] > spots.rooms).any():
            raise PeerLost("the node sends more than was asked for")
        memory, offsets = spots.segment.buffer, spots.offsets.tolist()
        self._values = [
            memory[offset : offset + length]
            for offset, length in zip(offsets, lengths, strict=True)
        ]

    @classmethod
    def full(cls, spots: Spots) -> _Landing:
        """Each spot is to be filled."""
        return cls(spots, spots.rooms.tolist())

    def land(self, asked: _Asked) -> list[int]:
        """The checksums of what has come then."""
        asked.link.receive(self._pieces, 0)
        return checksums_on_arrival(asked.link, self._values, self.lengths, asked.give_up_at)


def _check_head(answer: bytearray) -> None:
    status, _, nbytes = ANSWER.unpack_from(answer)
    if status != Status.OK or nbytes != len(answer) - ANSWER.size:
        raise PeerLost("the node's answer is none")


def _outcomes(link: Link, count: int, give_up_at: float) -> list[Put] | MoonserveError:
    head = bytearray(ANSWER.size)
    link.receive(vectors((address_of(head), len(head))))
    link.pump(give_up_at)
    status, _, nbytes = ANSWER.unpack(head)
    if nbytes > _MAX_FAILURE_BYTES or (status == Status.OK and nbytes != count):
        raise PeerLost("the node's answer is none")
    body = bytearray(nbytes)
    link.receive(vectors((address_of(body), nbytes)))
    link.pump(give_up_at)
    if status == Status.OK:
        return [Put(outcome) for outcome in body]
    return failure_from_wire(common_pb2.Failure.FromString(bytes(body)))
