"""Serves puts on express connections: reserves space, receives the bytes, verifies them, makes the objects visible.

Space is reserved and objects are made visible in the event loop (`LocalWrites`). In between, the connection's thread
receives the bytes straight into their place. Its rule: a value becomes visible only if all of it has arrived and
matches its writer's checksum; a failure in the middle of a question leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.express import frames
from kvstore.express.frames import ANSWER, CHECKSUM, WISH, MalformedQuestion, Status
from kvstore.express.link import Link, checksums_on_arrival, discard, received, send
from kvstore.mover import Mover
from kvstore.promises import Outcome, Reservation
from kvstore.state import StoreState
from kvstore.stored import Wish
from kvstore.wire import keys_from_wire, pin_from_wire
from protocol.errors import InvalidRequest, MoonserveError
from protocol.failures import failure_to_wire
from protocol.ids import new_id
from protocol.in_loop import InLoop
from protocol.keys import NO_PARENT, BlockKey
from protocol.pb import kvstore_pb2
from transfer import Segment
from transfer.native import address_of, vectors


class LocalWrites:
    """Reservations for writers in this process. It always ends them, so they need neither a window nor an expiry.

    Belongs to the node's event loop, like the state. `changed` is called after a reservation, `ended` at the end of a
    writer. `admit` raises if no writer is admitted now.
    """

    def __init__(
        self,
        state: StoreState,
        mover: Mover,
        clock: Callable[[], float],
        *,
        admit: Callable[[], None],
        changed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._state = state
        self._mover = mover
        self._clock = clock
        self._admit = admit
        self._changed = changed
        self._ended = ended

    def begin(self, wishes: Sequence[Wish]) -> Reservation | None:
        """Reserves space for the wishes. Returns None if demotions in flight will free memory: the caller must wait.

        Raises Overloaded, InvalidRequest.
        """
        self._admit()
        # Checked first: it is nearly always 0, and `short_of` takes longer.
        leaving = self._state.moves.leaving_bytes
        if leaving and self._state.short_of(self._state.bytes_to_write(wishes)):
            return None
        reservation = self._state.writers.reserve(new_id("here"), wishes, None, self._clock())
        self._changed()
        return reservation

    def end(
        self,
        reservation: Reservation,
        checksums: Mapping[BlockKey, int],
        corrupt: Collection[BlockKey],
    ) -> None:
        """Makes the granted objects visible, except the `corrupt` ones. Their receiver has verified the bytes."""
        now, writers = self._clock(), self._state.writers
        writers.commit(reservation.reservation_id, checksums, now)
        writers.verified(reservation.reservation_id, corrupt, now)
        self._mover.wants_copy(checksums)
        self._ended()

    def give_up(self, reservation: Reservation) -> None:
        """Frees the space. Nothing is stored."""
        if reservation.objects:
            now, writers = self._clock(), self._state.writers
            writers.abort(reservation.reservation_id, now)
            writers.closed(reservation.reservation_id, now)
            self._ended()


class Storing:
    """Answers puts of all connections, each in its own thread."""

    def __init__(self, segment: Segment, writes: LocalWrites, in_loop: InLoop) -> None:
        self._segment = segment
        self._writes = writes
        self._in_loop = in_loop

    def put(
        self,
        link: Link,
        count: int,
        nbytes: int,
        pin: int,
        tenant_bytes: int,
        give_up_at: float,
    ) -> None:
        """Answers one put whose head was received. Raises PeerLost, DeadlineExceeded; a put that has not arrived in
        full is not stored."""
        body = received(link, count * frames.WISH_BYTES + tenant_bytes, give_up_at)
        rows = np.frombuffer(body, WISH, count)
        if int(rows["length"].sum()) != nbytes or max(rows["length"], default=0) > nbytes:
            raise MalformedQuestion("values that do not fill what was announced")
        try:
            wishes = _wishes(rows, pin, bytes(body[count * frames.WISH_BYTES :]))
            reservation = self._in_loop.run(lambda: self._writes.begin(wishes))
        except MoonserveError as error:
            discard(link, nbytes + count * CHECKSUM.itemsize, give_up_at)
            _refuse(link, error, give_up_at)
            return
        if reservation is None:
            discard(link, nbytes + count * CHECKSUM.itemsize, give_up_at)
            outcomes = [Outcome.LATER] * count
        else:
            outcomes = self._store(link, reservation, give_up_at)
        send(link, ANSWER.pack(Status.OK, count, count) + bytes(outcomes), give_up_at)

    def _store(self, link: Link, reservation: Reservation, give_up_at: float) -> list[Outcome]:
        """Receives and stores the values. Returns the outcome of each."""
        try:
            arrived, announced = self._arrive(link, reservation, give_up_at)
        except BaseException:  # the reservation must be freed in any case
            self._in_loop.run(lambda: self._writes.give_up(reservation))
            raise
        outcomes = [slot.outcome for slot in reservation.slots]
        granted = [place for place, put in enumerate(outcomes) if put is Outcome.STORED]
        corrupt = [place for place in granted if arrived[place] != announced[place]]
        for place in corrupt:
            outcomes[place] = Outcome.CORRUPT
        if granted:
            key_at = [wish.key for wish in reservation.wishes]
            checksums = {key_at[place]: announced[place] for place in granted}
            dropped = [key_at[place] for place in corrupt]
            self._in_loop.run(lambda: self._writes.end(reservation, checksums, dropped))
        return outcomes

    def _arrive(self, link: Link, reservation: Reservation, give_up_at: float) -> tuple[list[int], list[int]]:
        """Receives the values. Returns the checksums of the received bytes and those announced by the writer. Values
        that were not granted are discarded."""
        lengths = [wish.length for wish in reservation.wishes]
        values = self._places(reservation, lengths)
        passed = [n for value, n in zip(values, lengths, strict=True) if value is None]
        nowhere = bytearray(max(passed, default=0))
        announced = np.empty(len(lengths), CHECKSUM)
        pieces = [
            (address_of(nowhere if value is None else value), length)
            for value, length in zip(values, lengths, strict=True)
            if length
        ]
        end = link.received + sum(lengths) + announced.nbytes
        link.receive(vectors(*pieces, (address_of(announced), announced.nbytes)), 0)
        arrived = checksums_on_arrival(link, values, lengths, give_up_at)
        link.wait_for(end)
        link.pump(give_up_at)
        told: list[int] = announced.tolist()
        return arrived, told

    def _places(self, reservation: Reservation, lengths: Sequence[int]) -> list[memoryview | None]:
        """Returns the memory of each value; None if it was not granted."""
        memory = self._segment.buffer
        return [
            memory[slot.offset : slot.offset + length] if slot.outcome is Outcome.GRANTED else None
            for slot, length in zip(reservation.slots, lengths, strict=True)
        ]


def _wishes(rows: npt.NDArray[np.void], pin: int, tenant: bytes) -> list[Wish]:
    """Returns the wishes. Raises InvalidRequest for a malformed tenant, pin or key."""
    try:
        name = tenant.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("a tenant's name is UTF-8", param="tenant") from error
    kind = pin_from_wire(kvstore_pb2.StorePin.ValueType(pin))
    columns = rows.tolist()
    keys = keys_from_wire(key for key, _, _ in columns)
    return [
        Wish(key=key, parent=_parent(parent), length=length, tenant=name, pin=kind)
        for key, (_, parent, length) in zip(keys, columns, strict=True)
    ]


def _parent(parent: bytes) -> BlockKey | None:
    return None if parent == NO_PARENT else BlockKey(parent)


def _refuse(link: Link, error: MoonserveError, give_up_at: float) -> None:
    payload = failure_to_wire(error).SerializeToString()
    send(link, ANSWER.pack(Status.FAILURE, 0, len(payload)) + payload, give_up_at)
