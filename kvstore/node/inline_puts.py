"""Serves puts on inline connections: reserves space, receives the bytes, verifies them, makes the objects visible.

Space is reserved and objects are made visible in the event loop (`LocalWrites`). In between, the connection's thread
receives the bytes straight into their place. Its rule: a value becomes visible only if all of it has arrived and
matches its writer's checksum; a failure in the middle of a request leaves nothing behind.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.client.node_access import inline_protocol
from moonserve.kvstore.client.node_access.inline_protocol import (
    CHECKSUM,
    PUT_ROW,
    RESPONSE,
    InlineConnection,
    MalformedRequest,
    ResponseStatus,
    discard,
    hash_on_arrival,
    receive_exactly,
    run_steps,
    send,
)
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.state.objects import PutOutcome, PutRequest, Reservation
from moonserve.kvstore.state.state import StoreState
from moonserve.kvstore.wire import keys_from_wire, parent_from_wire, pin_from_wire
from moonserve.protocol.errors import InvalidRequest, MoonserveError
from moonserve.protocol.kv_blocks import BlockKey, checksum
from moonserve.protocol.pb import kvstore_pb2
from moonserve.protocol.process.event_loop import LoopRunner
from moonserve.protocol.request import new_id
from moonserve.protocol.rpc.wire import failure_to_wire
from moonserve.transfer import Segment
from moonserve.transfer.memory.data_plane import address_of, vectors


@dataclass(eq=False, slots=True)
class LocalWrites:
    """Reservations for writers in this process. It always ends them, so they need neither a window nor an expiry.

    Belongs to the node's event loop, like the state. `changed` is called after a reservation, `ended` at the end of a
    writer. `admit` raises if no writer is admitted now.
    """

    state: StoreState
    mover: TierMover
    clock: Callable[[], float]
    admit: Callable[[], None]
    changed: Callable[[], None]
    ended: Callable[[], None]

    def reserve(self, puts: Sequence[PutRequest]) -> Reservation | None:
        """Reserves space for the requests. Returns None if demotions in flight will free memory: the caller must wait.

        Raises Overloaded, InvalidRequest.
        """
        self.admit()
        # Checked first: it is nearly always 0, and `short_of` takes longer.
        leaving = self.state.tier_moves.demoting_bytes
        if leaving and self.state.should_wait_for_memory(self.state.bytes_to_write(puts)):
            return None
        reservation = self.state.reservations.reserve(new_id("here"), puts, None, self.clock())
        self.changed()
        return reservation

    def commit(
        self,
        reservation: Reservation,
        checksums: Mapping[BlockKey, int],
        corrupt: Collection[BlockKey],
    ) -> None:
        """Makes the granted objects visible, except the `corrupt` ones. Their receiver has verified the bytes."""
        now, writers = self.clock(), self.state.reservations
        writers.commit(reservation.reservation_id, checksums, now)
        writers.verified(reservation.reservation_id, corrupt, now)
        self.mover.enqueue_copies(checksums)
        self.ended()

    def abort(self, reservation: Reservation) -> None:
        """Frees the space. Nothing is stored."""
        if reservation.objects:
            now, writers = self.clock(), self.state.reservations
            writers.abort(reservation.reservation_id, now)
            writers.window_closed(reservation.reservation_id, now)
            self.ended()


class InlinePuts:
    """Answers puts of all connections, each in its own thread."""

    def __init__(self, segment: Segment, writes: LocalWrites, in_loop: LoopRunner) -> None:
        self._segment = segment
        self._writes = writes
        self._in_loop = in_loop

    def put(
        self,
        link: InlineConnection,
        count: int,
        nbytes: int,
        pin: int,
        tenant_bytes: int,
        give_up_at: float,
    ) -> None:
        """Answers one put whose head was received. Raises PeerLost, DeadlineExceeded; a put that has not arrived in
        full is not stored."""
        body = receive_exactly(link, count * inline_protocol.PUT_ROW_BYTES + tenant_bytes, give_up_at)
        rows = np.frombuffer(body, PUT_ROW, count)
        if int(rows["length"].sum()) != nbytes or max(rows["length"], default=0) > nbytes:
            raise MalformedRequest("the values do not have the announced size")
        try:
            puts = _put_requests(rows, pin, bytes(body[count * inline_protocol.PUT_ROW_BYTES :]))
            reservation = self._in_loop.run(lambda: self._writes.reserve(puts))
        except MoonserveError as error:
            discard(link, nbytes + count * CHECKSUM.itemsize, give_up_at)
            payload = failure_to_wire(error).SerializeToString()
            send(link, RESPONSE.pack(ResponseStatus.FAILURE, 0, len(payload)) + payload, give_up_at)
            return
        if reservation is None:
            discard(link, nbytes + count * CHECKSUM.itemsize, give_up_at)
            outcomes = [PutOutcome.LATER] * count
        else:
            outcomes = self._store(link, reservation, give_up_at)
        send(link, RESPONSE.pack(ResponseStatus.OK, count, count) + bytes(outcomes), give_up_at)

    def _store(self, link: InlineConnection, reservation: Reservation, give_up_at: float) -> list[PutOutcome]:
        """Receives and stores the values. Returns the outcome of each."""
        try:
            arrived, announced = self._receive_values(link, reservation, give_up_at)
        except BaseException:  # the reservation must be freed in any case
            self._in_loop.run(lambda: self._writes.abort(reservation))
            raise
        outcomes = [slot.outcome for slot in reservation.slots]
        granted = [place for place, put in enumerate(outcomes) if put is PutOutcome.STORED]
        corrupt = [place for place in granted if arrived[place] != announced[place]]
        for place in corrupt:
            outcomes[place] = PutOutcome.CORRUPT
        if granted:
            key_at = [request.key for request in reservation.requests]
            checksums = {key_at[place]: announced[place] for place in granted}
            dropped = [key_at[place] for place in corrupt]
            self._in_loop.run(lambda: self._writes.commit(reservation, checksums, dropped))
        return outcomes

    def _receive_values(
        self, link: InlineConnection, reservation: Reservation, give_up_at: float
    ) -> tuple[list[int], list[int]]:
        """Receives the values. Returns the checksums of the received bytes and those announced by the writer. Values
        that were not granted are discarded."""
        lengths = [request.length for request in reservation.requests]
        values = self._value_memory(reservation, lengths)
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
        steps = hash_on_arrival(link, np.array(lengths, np.uint64), lambda place: checksum([values[place] or b""]))
        arrived = run_steps(steps, link, give_up_at)
        link.wait_for(end)
        link.transfer(give_up_at)
        told: list[int] = announced.tolist()
        return arrived, told

    def _value_memory(self, reservation: Reservation, lengths: Sequence[int]) -> list[memoryview | None]:
        """Returns the memory of each value; None if it was not granted."""
        memory = self._segment.buffer
        return [
            memory[slot.offset : slot.offset + length] if slot.outcome is PutOutcome.GRANTED else None
            for slot, length in zip(reservation.slots, lengths, strict=True)
        ]


def _put_requests(rows: npt.NDArray[np.void], pin: int, tenant: bytes) -> list[PutRequest]:
    """Returns the requests. Raises InvalidRequest for a malformed tenant, pin or key."""
    try:
        name = tenant.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("a tenant's name is UTF-8", param="tenant") from error
    kind = pin_from_wire(kvstore_pb2.StorePin.ValueType(pin))
    columns = rows.tolist()
    keys = keys_from_wire(key for key, _, _ in columns)
    return [
        PutRequest(key=key, parent=parent_from_wire(parent), length=length, tenant=name, pin=kind)
        for key, (_, parent, length) in zip(keys, columns, strict=True)
    ]
