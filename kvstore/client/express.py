"""Client side of express: reads and writes small batches at one node in one round trip (`kvstore.express`).

Only bytes that match the checksum count, as for every read of memory that is not mapped. Objects that the answer does
not carry are returned as a `Fate` or an entry and left to the general paths. A connection on which anything went wrong
is closed. Knows one node.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.client.deadline import Deadline
from kvstore.client.objects import Fate, ToPut, wrong_length
from kvstore.client.rights import Terms
from kvstore.client.spots import Spots, Words
from kvstore.express import frames
from kvstore.express.frames import ANSWER, CHECKSUM, Kind, Status
from kvstore.express.link import SPIN_NS, Link, Steps, finish, finish_in_loop, hashing, millis
from kvstore.native.base import NO_RECORD, Entry
from kvstore.native.layout import Standing
from kvstore.promises import Outcome
from kvstore.wire import pin_to_wire
from protocol.errors import Incompatible, MoonserveError, Overloaded, PeerLost
from protocol.failures import failure_from_wire
from protocol.keys import NO_PARENT, BlockKey
from protocol.lean.frames import MAX_MESSAGE_BYTES
from protocol.pb import common_pb2
from transfer import Segment
from transfer.native import IoVectors, address_of, data_plane, vectors
from transfer.scatter import LOCAL, Rows

GET_KEYS = 4096
"""Most keys in one get: the node's own limit."""
GET_BYTES = 4 * 2**20
PUT_BYTES = 4 * 2**20
"""Largest put in bytes. Larger ones use the transfer engine, which slices them and spreads them over streams."""
_MAX_FAILURE_BYTES = min(MAX_MESSAGE_BYTES, 1 << 20)

_SENT = Standing.SENT << 32
_MISSING, _UNKNOWN = int(Standing.MISSING), int(Standing.UNKNOWN)
Found = int | Entry | Fate
"""Result for one key: the length now in its spot, an entry for an object that was not sent, or neither (a `Fate`)."""


class NotOffered(Exception):
    """Raised if the node does not offer express or has no room for another connection."""


class Express:
    """Thread-safe pool of connections, one per concurrent call. `close` it; calls in flight then close their own."""

    def __init__(self, dial: Callable[[float], socket.socket]) -> None:
        """`dial` connects within the given seconds. Raises as a call; Incompatible, Overloaded mean "not offered"."""
        self._dial = dial
        self._idle: deque[Link] = deque()
        self._lock = threading.Lock()
        self._num_used = 0
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def get(self, keys: Sequence[BlockKey], spots: Spots, deadline: Deadline) -> list[Found]:
        """Reads values that fit their spots, up to `GET_BYTES`. Raises NotOffered, PeerLost, DeadlineExceeded."""
        left_s = deadline.left_s()
        with self._link(deadline) as link:
            steps = _getting(link, keys, spots, left_s)
            return finish(steps, link, time.monotonic() + left_s)

    def scatter(self, keys: Sequence[BlockKey], spots: Spots, local: Segment, deadline: Deadline) -> list[int | Fate]:
        """Reads values into spots of several pieces, up to `GET_BYTES` in all, and returns their checksums.

        `local` must have room for all of them. Raises as `get`, and InvalidRequest for a value of another length.
        """
        left_s = deadline.left_s()
        with self._link(deadline) as link:
            steps = _scattering(link, keys, spots, local, left_s)
            return finish(steps, link, time.monotonic() + left_s)

    async def scatter_in_loop(
        self, keys: Sequence[BlockKey], spots: Spots, local: Segment, deadline: Deadline
    ) -> list[int | Fate] | None:
        """Does the same as `scatter` in an event loop. Returns None if there is no idle connection: dialling blocks.

        After cancellation no more bytes arrive.
        """
        link = self._idle_link()
        if link is None:
            return None
        left_s = deadline.left_s()
        with _Using(link, self._begin, self._end):
            steps = _scattering(link, keys, spots, local, left_s)
            return await finish_in_loop(steps, link, time.monotonic() + left_s)

    def exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool | Fate]:
        """Tells which keys exist, by a get without room for values; ASK if the node cannot tell. Raises as `get`."""
        left_s, rooms = deadline.left_s(), np.zeros(len(keys), np.uint64)
        with self._link(deadline) as link:
            steps = _told(_ask(link, keys, rooms, left_s, 0), link)
            standings = finish(steps, link, time.monotonic() + left_s).standings
        return [Fate.ASK if standing == _UNKNOWN else standing != _MISSING for standing in standings]

    def get_packed(self, keys: Sequence[BlockKey], local: Segment, deadline: Deadline) -> tuple[list[Found], Spots]:
        """Reads values of unknown length and packs them back to back into `local`, which has room for `GET_BYTES`."""
        rooms = np.full(len(keys), frames.NOT_LIMITED, np.uint64)
        left_s = deadline.left_s()
        give_up_at = time.monotonic() + left_s
        with self._link(deadline) as link:
            told = finish(_told(_ask(link, keys, rooms, left_s), link), link, give_up_at)
            spots = Spots.packed(local, told.lengths)
            arrived = finish(_Landing(spots, told.lengths).land(link), link, give_up_at)
            return told.found(arrived), spots

    def put(self, objects: Sequence[ToPut], spots: Spots, terms: Terms, deadline: Deadline) -> list[Outcome]:
        """Stores the value that fills each spot. Checksums are computed while the bytes travel.

        Raises the node's own error, NotOffered, PeerLost, DeadlineExceeded. Nothing is in flight after it has raised.
        """
        count, left_s = len(objects), deadline.left_s()
        lengths: list[int] = spots.lengths.tolist()
        pin, tenant = pin_to_wire(terms.pin), terms.tenant.encode()
        head = frames.question(Kind.PUT, count, millis(left_s), sum(lengths), pin=pin, tenant=tenant)
        keys = [each.key for each in objects]
        rows = frames.wishes(keys, [each.parent or NO_PARENT for each in objects], lengths)
        message = b"".join((head, rows, tenant))
        give_up_at = time.monotonic() + left_s
        with self._link(deadline) as link:
            link.say(message)  # the node reserves space while the values follow
            link.send(spots.vectors())
            link.push()
            checksums = np.array([each.checksum for each in objects], CHECKSUM)
            link.send(vectors((address_of(checksums), checksums.nbytes)))
            outcomes = _outcomes(link, count, give_up_at)
        if isinstance(outcomes, MoonserveError):
            raise outcomes
        return outcomes

    def _link(self, deadline: Deadline) -> _Using:
        """Returns a context manager that lends a connection, and closes it if the block raises."""
        return _Using(self._take(deadline), self._begin, self._end)

    def _begin(self, link: Link) -> None:
        with self._lock:
            self._num_used += 1
            # Several spinning threads would only take time from each other.
            link.spin_ns = SPIN_NS if self._num_used == 1 else 0

    def _end(self, link: Link, good: bool) -> None:
        with self._lock:
            self._num_used -= 1
            if good and not self._closed:
                self._idle.append(link)
            else:
                link.close()

    def _take(self, deadline: Deadline) -> Link:
        """Returns the most recently used connection, whose memory is the warmest in the cache, or a new one."""
        idle = self._idle_link()
        if idle is not None:
            return idle
        try:
            return Link(self._dial(deadline.left_s()))
        except (Incompatible, Overloaded) as error:
            raise NotOffered from error
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error

    def _idle_link(self) -> Link | None:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return None
            if link.is_quiet():
                return link
            link.close()


class _Using:
    """Context manager of one connection. A class, because a generator is noticeably slower in small calls."""

    __slots__ = ("_begin", "_end", "_link")

    def __init__(self, link: Link, begin: Callable[[Link], None], end: Callable[[Link, bool], None]) -> None:
        self._link, self._begin, self._end = link, begin, end

    def __enter__(self) -> Link:
        self._begin(self._link)
        return self._link

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(self._link, kind is None)


def _getting(link: Link, keys: Sequence[BlockKey], spots: Spots, left_s: float) -> Steps[list[Found]]:
    count = _ask(link, keys, spots.rooms, left_s)
    expected = _Landing.full(spots)  # prepared while the node looks the keys up
    told = yield from _told(count, link)
    if told.is_all_of(spots.rooms):
        return told.all_found((yield from expected.land(link)), expected.lengths)
    return told.found((yield from _Landing(spots, told.lengths).land(link)))


def _scattering(
    link: Link, keys: Sequence[BlockKey], spots: Spots, local: Segment, left_s: float
) -> Steps[list[int | Fate]]:
    """Receives each value in one piece, hashes it as it arrives, then copies it to the pieces of its spot.

    This copy is faster than receiving and hashing many small pieces.
    """
    lengths: list[int] = spots.lengths.tolist()
    count = _ask(link, keys, spots.lengths, left_s)
    packed = _packed(local, spots.rows, lengths)  # prepared while the node looks the keys up
    told = yield from _told(count, link)
    all_there = told.is_all_of(spots.lengths)
    if not all_there:
        told.require(lengths)
        lengths = told.lengths
        packed = _packed(local, spots.rows, lengths)
    rows, values = packed
    link.receive(vectors((local.base, sum(lengths))), 0)
    arrived = yield from hashing(link, values, lengths)
    data_plane().copy_rows(spots.segment.base, local.base, rows, to_column=LOCAL)
    return list(arrived) if all_there and told.checksums == arrived else told.scattered(arrived)


def _packed(
    local: Segment, rows: Callable[[Sequence[int]], Rows], lengths: Sequence[int]
) -> tuple[Rows, list[memoryview]]:
    """Returns the copies from values back to back in `local` to their pieces, and the values."""
    ends = list(itertools.accumulate(lengths))
    begins = [0, *ends[:-1]]
    values = [local.buffer[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return rows(begins), values


def _ask(link: Link, keys: Sequence[BlockKey], rooms: Words, left_s: float, nbytes: int = GET_BYTES) -> int:
    """Sends a get to the node and returns the number of keys."""
    head = frames.question(Kind.GET, len(keys), millis(left_s), nbytes)
    link.say(b"".join((head, *keys, rooms.tobytes())))
    return len(keys)


def _told(count: int, link: Link) -> Steps[_Told]:
    """Receives the node's rows. Raises PeerLost for a failure: a get fails only if the node itself does."""
    answer = frames.answer_room(count)
    end = link.received + len(answer)
    link.receive(vectors((address_of(answer), len(answer))), ANSWER.size)
    yield
    _check_head(answer)
    if link.received < end:
        link.wait_for(end)
        yield
    return _Told(frames.rows_in(answer, count))


class _Told:
    """Rows of a node's answer: per key offset, length and standing, checksum, generation."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows
        self._extents = rows[:, 1]

    def is_all_of(self, rooms: Words) -> bool:
        """True if every value is sent and fills its room, which is the usual case."""
        return bool((self._extents == rooms + _SENT).all())

    @property
    def standings(self) -> list[int]:
        return [extent >> 32 for extent in self._extents.tolist()]

    @property
    def lengths(self) -> list[int]:
        """Length of each value that is sent; 0 for the others."""
        return [extent - _SENT if extent >> 32 == Standing.SENT else 0 for extent in self._extents.tolist()]

    def require(self, lengths: Sequence[int]) -> None:
        """Raises InvalidRequest if an existing object has another length."""
        for extent, expected in zip(self._extents.tolist(), lengths, strict=True):
            standing, length = frames.standing_and_length(extent)
            if standing not in (_MISSING, _UNKNOWN) and length != expected:
                raise wrong_length(expected)

    def scattered(self, arrived: Sequence[int]) -> list[int | Fate]:
        """Returns each intact value's checksum, else a `Fate`. Checksums of values that were not sent are ignored."""
        found = zip(self.found(arrived), arrived, strict=True)
        return [
            each if isinstance(each, Fate) else Fate.ASK if isinstance(each, Entry) else checksum
            for each, checksum in found
        ]

    @property
    def checksums(self) -> list[int]:
        """The writers' checksums; 0 for absent objects."""
        checksums: list[int] = self._rows[:, 2].tolist()
        return checksums

    def all_found(self, arrived: Sequence[int], lengths: Sequence[int]) -> list[Found]:
        """Returns the same as `found`, if all values were to be sent."""
        return list(lengths) if arrived == self.checksums else self.found(arrived)

    def found(self, arrived: Sequence[int]) -> list[Found]:
        """Returns each key's result, given the checksums of the received bytes. Those of unsent values are ignored."""
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
    """Memory that receives the values of an answer."""

    def __init__(self, spots: Spots, lengths: Sequence[int]) -> None:
        """Raises PeerLost if the node announces more bytes than a spot has room for."""
        self.lengths = lengths
        self._pieces: IoVectors = np.empty((len(lengths), 2), np.uint64)
        self._pieces[:, 0], self._pieces[:, 1] = spots.addresses, lengths
        if (self._pieces[:, 1] > spots.rooms).any():
            raise PeerLost("the node sends more than was asked for")
        memory, offsets = spots.segment.buffer, spots.offsets.tolist()
        self._values = [memory[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)]

    @classmethod
    def full(cls, spots: Spots) -> _Landing:
        """Expects a value that fills each spot."""
        return cls(spots, spots.rooms.tolist())

    def land(self, link: Link) -> Steps[list[int]]:
        """Receives the values and returns the checksums of the received bytes."""
        link.receive(self._pieces, 0)
        return (yield from hashing(link, self._values, self.lengths))


def _check_head(answer: bytearray) -> None:
    status, _, nbytes = ANSWER.unpack_from(answer)
    if status != Status.OK or nbytes != len(answer) - ANSWER.size:
        raise PeerLost("the node's answer is none")


def _outcomes(link: Link, count: int, give_up_at: float) -> list[Outcome] | MoonserveError:
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
        return [Outcome(outcome) for outcome in body]
    return failure_from_wire(common_pb2.Failure.FromString(bytes(body)))
