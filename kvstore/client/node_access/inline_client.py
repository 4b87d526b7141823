"""Client side of inline connections: reads and writes small batches at one node in one round trip.

Only bytes that match the checksum count, as for every read of memory that is not mapped. Objects that the response does
not carry are returned as a `ReadMiss` or an entry and left to the general paths. A connection on which anything went
wrong is closed. Knows one node.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from moonserve.kvstore.client.node_access import inline_protocol
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.inline_protocol import (
    CHECKSUM,
    RESPONSE,
    SPIN_NS,
    InlineConnection,
    RequestKind,
    ResponseStatus,
    Steps,
    hash_on_arrival,
    millis,
    receive_exactly,
    run_steps,
    run_steps_in_loop,
)
from moonserve.kvstore.client.node_access.lease_and_put import PutOptions
from moonserve.kvstore.client.node_access.objects import ReadMiss, ToPut, wrong_length
from moonserve.kvstore.index_layout import NO_RECORD, Entry, LocateStatus
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.kvstore.wire import pin_to_wire
from moonserve.protocol.errors import Incompatible, MoonserveError, Overloaded, PeerLost
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, checksum
from moonserve.protocol.pb import common_pb2
from moonserve.protocol.rpc.frames import MAX_MESSAGE_BYTES
from moonserve.protocol.rpc.wire import failure_from_wire
from moonserve.transfer import Segment
from moonserve.transfer.memory.data_plane import SHORT_VALUE, Words, address_of, vectors

GET_KEYS = 4096
"""Most keys in one get: the node's own limit."""
GET_BYTES = 4 * 2**20
PUT_BYTES = 4 * 2**20
"""Largest put in bytes. Larger ones use the transfer engine, which slices them and spreads them over streams."""
_MAX_FAILURE_BYTES = min(MAX_MESSAGE_BYTES, 1 << 20)

_SENT = LocateStatus.SENT << 32
_MISSING, _UNKNOWN = int(LocateStatus.MISSING), int(LocateStatus.UNKNOWN)
Found = int | Entry | ReadMiss
"""Result for one key: the length now in its slot, an entry for an object that was not sent, or neither (a
`ReadMiss`)."""


class NotOffered(Exception):
    """Raised if the node does not offer inline connections or has no room for another connection."""


class InlineClient:
    """Thread-safe pool of connections, one per concurrent call. `close` it; calls in flight then close their own."""

    def __init__(self, dial: Callable[[float], socket.socket]) -> None:
        """`dial` connects within the given seconds. Raises as a call; Incompatible, Overloaded mean "not offered"."""
        self._dial = dial
        self._idle: deque[InlineConnection] = deque()
        self._lock = threading.Lock()
        self._num_used = 0
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def get(self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline) -> list[Found]:
        """Reads values that fit their slots, up to `GET_BYTES`. Raises NotOffered, PeerLost, DeadlineExceeded."""
        left_s = deadline.left_s()
        with self._link(deadline) as link:
            return run_steps(_get_steps(link, keys, slots, left_s), link, time.monotonic() + left_s)

    def scatter(self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline) -> list[int | ReadMiss]:
        """Reads values into slots of several pieces, up to `GET_BYTES` in all, and returns their checksums.

        Raises as `get`, and InvalidRequest for a value of another length.
        """
        left_s = deadline.left_s()
        with self._link(deadline) as link:
            return run_steps(_scatter_steps(link, keys, slots, left_s), link, time.monotonic() + left_s)

    async def scatter_in_loop(
        self, keys: Sequence[BlockKey], slots: BufferSlots, deadline: Deadline
    ) -> list[int | ReadMiss] | None:
        """Does the same as `scatter` in an event loop. Returns None if there is no idle connection: dialling blocks.

        After cancellation no more bytes arrive.
        """
        link = self._idle_link()
        if link is None:
            return None
        left_s = deadline.left_s()
        with _LentConnection(self, link):
            steps = _scatter_steps(link, keys, slots, left_s)
            return await run_steps_in_loop(steps, link, time.monotonic() + left_s)

    def exist(self, keys: Sequence[BlockKey], deadline: Deadline) -> list[bool | ReadMiss]:
        """Tells which keys exist, by a get without room for values; ASK if the node cannot tell. Raises as `get`."""
        left_s, rooms = deadline.left_s(), np.zeros(len(keys), np.uint64)
        with self._link(deadline) as link:
            steps = _receive_rows(_send_get(link, keys, rooms, left_s, 0), link)
            standings = run_steps(steps, link, time.monotonic() + left_s).statuses
        return [ReadMiss.ASK_NODE if standing == _UNKNOWN else standing != _MISSING for standing in standings]

    def get_packed(
        self, keys: Sequence[BlockKey], local: Segment, deadline: Deadline
    ) -> tuple[list[Found], BufferSlots]:
        """Reads values of unknown length and packs them back to back into `local`, which has room for `GET_BYTES`."""
        rooms = np.full(len(keys), inline_protocol.UNLIMITED, np.uint64)
        left_s = deadline.left_s()
        give_up_at = time.monotonic() + left_s
        with self._link(deadline) as link:
            told = run_steps(_receive_rows(_send_get(link, keys, rooms, left_s), link), link, give_up_at)
            if int(told.lengths.sum()) > local.nbytes:
                raise PeerLost("the node sent more bytes than requested")
            slots = BufferSlots.packed(local, told.lengths.tolist())
            arrived = run_steps(_receive_values(link, slots, slots.lengths), link, give_up_at)
            return told.results(arrived), slots

    def put(
        self, objects: Sequence[ToPut], slots: BufferSlots, terms: PutOptions, deadline: Deadline
    ) -> list[PutOutcome]:
        """Stores the value that fills each slot. Checksums are computed while the bytes travel.

        Raises the node's own error, NotOffered, PeerLost, DeadlineExceeded. Nothing is in flight after it has raised.
        """
        count, left_s = len(objects), deadline.left_s()
        lengths: list[int] = slots.lengths.tolist()
        pin, tenant = pin_to_wire(terms.pin), terms.tenant.encode()
        head = inline_protocol.pack_request(
            RequestKind.PUT, count, millis(left_s), sum(lengths), pin=pin, tenant=tenant
        )
        keys = [each.key for each in objects]
        rows = inline_protocol.pack_put_rows(keys, [each.parent or NO_PARENT for each in objects], lengths)
        message = b"".join((head, rows, tenant))
        give_up_at = time.monotonic() + left_s
        with self._link(deadline) as link:
            link.send_message(message)  # the node reserves space while the values follow
            link.send(slots.vectors())
            link.send_without_waiting()
            checksums = np.array([each.checksum for each in objects], CHECKSUM)
            link.send(vectors((address_of(checksums), checksums.nbytes)))
            outcomes = _receive_outcomes(link, count, give_up_at)
        if isinstance(outcomes, MoonserveError):
            raise outcomes
        return outcomes

    def _link(self, deadline: Deadline) -> "_LentConnection":
        """Returns a context manager that lends a connection, and closes it if the block raises."""
        return _LentConnection(self, self._take(deadline))

    def lend(self, link: InlineConnection) -> None:
        with self._lock:
            self._num_used += 1
            # Several spinning threads would only take time from each other.
            link.spin_ns = SPIN_NS if self._num_used == 1 else 0

    def take_back(self, link: InlineConnection, good: bool) -> None:
        with self._lock:
            self._num_used -= 1
            if good and not self._closed:
                self._idle.append(link)
            else:
                link.close()

    def _take(self, deadline: Deadline) -> InlineConnection:
        """Returns the most recently used connection, whose memory is the warmest in the cache, or a new one."""
        idle = self._idle_link()
        if idle is not None:
            return idle
        try:
            return InlineConnection(self._dial(deadline.left_s()))
        except (Incompatible, Overloaded) as error:
            raise NotOffered from error
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error

    def _idle_link(self) -> InlineConnection | None:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return None
            if link.is_idle():
                return link
            link.close()


class _LentConnection:
    """Context manager of one connection. A class, because a generator is noticeably slower in small calls."""

    __slots__ = ("_client", "_link")

    def __init__(self, client: InlineClient, link: InlineConnection) -> None:
        self._client, self._link = client, link

    def __enter__(self) -> InlineConnection:
        self._client.lend(self._link)
        return self._link

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._client.take_back(self._link, kind is None)


def _get_steps(
    link: InlineConnection, keys: Sequence[BlockKey], slots: BufferSlots, left_s: float
) -> Steps[list[Found]]:
    count = _send_get(link, keys, slots.capacities, left_s)
    told = yield from _receive_rows(count, link)
    all_there = told.is_all_of(slots.capacities)
    lengths = slots.capacities if all_there else told.lengths
    arrived = yield from _receive_values(link, slots, lengths)
    return lengths.tolist() if all_there and arrived == told.checksums else told.results(arrived)


def _scatter_steps(
    link: InlineConnection, keys: Sequence[BlockKey], slots: BufferSlots, left_s: float
) -> Steps[list[int | ReadMiss]]:
    def checksum_of(place: int) -> int:
        return slots.checksum(place) if slots.lengths[place] <= SHORT_VALUE else 0  # 0: not sent

    count = _send_get(link, keys, slots.lengths, left_s)
    pieces = slots.vectors()  # prepared while the node looks the keys up
    told = yield from _receive_rows(count, link)
    lengths, all_there = slots.lengths, told.is_all_of(slots.lengths)
    if not all_there:
        told.require(lengths.tolist())
        lengths = told.lengths
        pieces = slots.at(np.flatnonzero(lengths).tolist()).vectors()
    link.receive(pieces, 0)
    arrived = yield from hash_on_arrival(link, lengths, checksum_of)
    return list(arrived) if all_there and told.checksums == arrived else told.scattered(arrived)


def _send_get(
    link: InlineConnection, keys: Sequence[BlockKey], rooms: Words, left_s: float, nbytes: int = GET_BYTES
) -> int:
    """Sends a get to the node and returns the number of keys."""
    head = inline_protocol.pack_request(RequestKind.GET, len(keys), millis(left_s), nbytes)
    link.send_message(b"".join((head, *keys, rooms.tobytes())))
    return len(keys)


def _receive_rows(count: int, link: InlineConnection) -> "Steps[_ResponseRows]":
    """Receives the node's rows. Raises PeerLost for a failure: a get fails only if the node itself does."""
    answer = bytearray(RESPONSE.size + count * inline_protocol.ROW_BYTES)
    end = link.received + len(answer)
    link.receive(vectors((address_of(answer), len(answer))), RESPONSE.size)
    yield
    status, _, nbytes = RESPONSE.unpack_from(answer)
    if status != ResponseStatus.OK or nbytes != len(answer) - RESPONSE.size:
        raise PeerLost("the node's response has an unknown format")
    if link.received < end:
        link.wait_for(end)
        yield
    return _ResponseRows(np.frombuffer(answer, np.uint64, count * 4, RESPONSE.size).reshape(count, 4))


class _ResponseRows:
    """Rows of a node's answer: per key offset, length and standing, checksum, generation."""

    def __init__(self, rows: Words) -> None:
        self._rows = rows
        self._extents = rows[:, 1]

    def is_all_of(self, rooms: Words) -> bool:
        """True if every value is sent and fills its room, which is the usual case."""
        return bool((self._extents == rooms + _SENT).all())

    @property
    def statuses(self) -> list[int]:
        return [extent >> 32 for extent in self._extents.tolist()]

    @property
    def lengths(self) -> Words:
        """Length of each value that is sent; 0 for the others."""
        return np.where(self._extents >> 32 == LocateStatus.SENT, self._extents & 0xFFFFFFFF, 0).astype(np.uint64)

    def require(self, lengths: Sequence[int]) -> None:
        """Raises InvalidRequest if an existing object has another length."""
        for extent, expected in zip(self._extents.tolist(), lengths, strict=True):
            standing, length = inline_protocol.status_and_length(extent)
            if standing not in (_MISSING, _UNKNOWN) and length != expected:
                raise wrong_length(expected)

    def scattered(self, arrived: Sequence[int]) -> list[int | ReadMiss]:
        """Returns each intact value's checksum, else a `ReadMiss`. Checksums of values that were not sent are
        ignored."""
        found = zip(self.results(arrived), arrived, strict=True)
        return [
            each if isinstance(each, ReadMiss) else ReadMiss.ASK_NODE if isinstance(each, Entry) else checksum
            for each, checksum in found
        ]

    @property
    def checksums(self) -> list[int]:
        """The writers' checksums; 0 for absent objects."""
        checksums: list[int] = self._rows[:, 2].tolist()
        return checksums

    def results(self, arrived: Sequence[int]) -> list[Found]:
        """Returns each key's result, given the checksums of the received bytes. Those of unsent values are ignored."""
        rows: list[list[int]] = self._rows.tolist()
        return [_found(row, checksum) for row, checksum in zip(rows, arrived, strict=True)]


def _found(row: Sequence[int], arrived: int) -> Found:
    offset, extent, checksum, generation = row
    standing, length = inline_protocol.status_and_length(extent)
    if standing == LocateStatus.SENT:
        return length if arrived == checksum else ReadMiss.ASK_NODE
    if standing == LocateStatus.IN_MEMORY:
        return Entry(NO_RECORD, generation, checksum, length, offset)
    return ReadMiss.ABSENT if standing == LocateStatus.MISSING else ReadMiss.ASK_NODE


def _receive_values(link: InlineConnection, slots: BufferSlots, lengths: Words) -> Steps[list[int]]:
    """Receives values into slots of one piece and returns the checksums of the received bytes.

    Raises PeerLost if the node announces more bytes than a slot has room for.
    """
    if (lengths > slots.capacities).any():
        raise PeerLost("the node sent more bytes than requested")
    link.receive(np.stack((slots.addresses, lengths), axis=1), 0)

    def checksum_of(place: int) -> int:
        return checksum([slots.memory(place, int(lengths[place]))])

    return (yield from hash_on_arrival(link, lengths, checksum_of))


def _receive_outcomes(link: InlineConnection, count: int, give_up_at: float) -> list[PutOutcome] | MoonserveError:
    status, _, nbytes = RESPONSE.unpack(receive_exactly(link, RESPONSE.size, give_up_at))
    if nbytes > _MAX_FAILURE_BYTES or (status == ResponseStatus.OK and nbytes != count):
        raise PeerLost("the node's response has an unknown format")
    body = receive_exactly(link, nbytes, give_up_at)
    if status == ResponseStatus.OK:
        return [PutOutcome(outcome) for outcome in body]
    return failure_from_wire(common_pb2.Failure.FromString(bytes(body)))
