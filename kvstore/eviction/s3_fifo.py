"""S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023).

New keys wait in a small queue, a tenth of the store. At its end a key that was read at least twice meanwhile moves to
the main queue, any other is evicted and remembered as a ghost; a key that comes back while a ghost goes straight to
the main queue. At the end of the main queue a key that was read goes round again, with its count one lower.

Here only keys on offer can go. A key keeps its place in its queue while it is withdrawn, and a queue's end is its
oldest key *on offer*; so a chain's head waits where it stands until its followers have left, and is judged by what it
was read meanwhile. The shares are of all resident keys, whether on offer or not. If the queue whose turn it is has
nothing on offer, the other one gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.eviction.order import Order
from protocol.keys import BlockKey

SMALL_SHARE = 0.1
"""Of the resident keys (section 4.1 of the paper)."""
MAX_READS = 3
"""Two bits per key, as in the paper."""
READS_TO_STAY = 2
"""`freq > 1` in the paper's algorithm 1."""


@dataclass(slots=True, eq=False)
class _Resident:
    place: int  # in the order of its queue
    is_small: bool
    reads: int = 0  # since it was added, less one for each round of the main queue


class S3Fifo:
    """Two queues and the ghosts of what the small one evicted."""

    name = "s3-fifo"

    def __init__(self) -> None:
        self._clock = 0  # counts places
        self._residents: dict[BlockKey, _Resident] = {}
        self._num_small = 0
        self._small, self._main = Order(), Order()  # the keys on offer, by place
        self._ghosts: dict[BlockKey, None] = {}  # oldest first, no more than residents
        self._named: BlockKey | None = None  # the victim, until it is gone

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        is_small = key not in self._ghosts
        self._ghosts.pop(key, None)
        self._residents[key] = _Resident(self._tick(), is_small)
        self._num_small += is_small

    def used(self, key: BlockKey) -> None:
        resident = self._residents[key]
        resident.reads = min(resident.reads + 1, MAX_READS)

    def offer(self, key: BlockKey) -> None:
        resident = self._residents[key]
        (self._small if resident.is_small else self._main).put(key, (resident.place,))

    def withdraw(self, key: BlockKey) -> None:
        self._small.discard(key)
        self._main.discard(key)

    def forget(self, key: BlockKey) -> None:
        self.withdraw(key)
        resident = self._residents.pop(key, None)
        if resident is None:
            return
        self._num_small -= resident.is_small
        if key == self._named and resident.is_small:
            self._ghosts[key] = None
        while len(self._ghosts) > len(self._residents):
            del self._ghosts[next(iter(self._ghosts))]
        self._named = None

    def victim(self) -> BlockKey | None:
        self._named = None
        while self._named is None and (candidate := self._candidate()) is not None:
            if not self._spare(candidate):
                self._named = candidate
        return self._named

    def _candidate(self) -> BlockKey | None:
        """The end of the queue whose turn it is."""
        small, main = self._small.first(), self._main.first()
        if self._num_small >= SMALL_SHARE * len(self._residents):
            return small if small is not None else main
        return main if main is not None else small

    def _spare(self, key: BlockKey) -> bool:
        """Sends `key` to the back of the main queue if it deserves to stay."""
        resident = self._residents[key]
        if resident.reads < (READS_TO_STAY if resident.is_small else 1):
            return False
        self.withdraw(key)
        if resident.is_small:
            self._num_small -= 1
            resident.is_small, resident.reads = False, 0
        else:
            resident.reads -= 1
        resident.place = self._tick()
        self.offer(key)
        return True

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
