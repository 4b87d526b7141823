"""Rights to write for this very process, which ends each of them: so they need neither a window nor an expiry.

Belongs to the node's event loop, like the state. An object becomes visible only by `end`, after the bytes that lie
there were compared by whoever received them; nobody else can have written there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from kvstore.mover import Mover
from kvstore.promises import Reservation, Wish
from kvstore.state import StoreState
from protocol.ids import new_id
from protocol.keys import BlockKey


class LocalWrites:
    """`changed` is called when something was reserved, `ended` when a writer has ended; `admit` raises why not now."""

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
        """Space for what nobody stores yet; None: there will be some soon, which takes waiting.

        Raises Overloaded, InvalidRequest.
        """
        self._admit()
        # Asked first: it is 0 nearly always, and the rest takes a while.
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
        """What was granted and is not `corrupt` is visible."""
        now, writers = self._clock(), self._state.writers
        writers.commit(reservation.reservation_id, checksums, now)
        writers.verified(reservation.reservation_id, corrupt, now)
        self._mover.wants_copy(checksums)
        self._ended()

    def give_up(self, reservation: Reservation) -> None:
        """Nothing of it is stored."""
        if reservation.objects:
            now, writers = self._clock(), self._state.writers
            writers.abort(reservation.reservation_id, now)
            writers.closed(reservation.reservation_id, now)
            self._ended()
