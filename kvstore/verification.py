"""Every object of a node compared with its checksum, in memory and on disk; what does not match is dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from kvstore.disk.base import DiskRead
from kvstore.mover import Mover
from kvstore.state import StoreState
from kvstore.stored import StoredObject
from protocol.checksum import checksum
from protocol.keys import BlockKey
from protocol.pb import kvstore_pb2
from transfer import Segment, TransferEngine

T = TypeVar("T")

# A few milliseconds in a thread at a time, so that others get their turn.
PIECE_BYTES = 32 * 2**20


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`itertools.batched` of Python 3.12, as lists."""
    iterator = iter(items)
    while piece := list(islice(iterator, size)):
        yield piece


class Verifier:
    """One pass over the objects that were there when it began."""

    def __init__(
        self,
        state: StoreState,
        mover: Mover,
        segment: Segment,
        in_thread: Callable[[Callable[[], bool]], Awaitable[bool]],
    ) -> None:
        self._state = state
        self._mover = mover
        self._memory = segment.buffer
        self._in_thread = in_thread

    async def run(self) -> AsyncIterator[kvstore_pb2.StoreVerifyReply]:
        """Progress after each piece."""
        keys = [stored.key for stored in self._state.catalog.objects()]
        checked = 0
        for piece in batched(keys, 1_000):
            rotten = [found for key in piece if (found := await self._rotten(key)) is not None]
            await self._drop(rotten)
            checked += len(piece)
            corrupt = [stored.key for stored in rotten]
            yield kvstore_pb2.StoreVerifyReply(checked=checked, total=len(keys), corrupt=corrupt)

    async def _drop(self, rotten: list[StoredObject]) -> None:
        """But for what has been stored anew meanwhile."""
        corrupt = [stored.key for stored in rotten if self._is_here(stored)]
        if corrupt:
            self._state.remove(corrupt, corrupt=True)
            await self._mover.forget(dict.fromkeys(corrupt, self._state.catalog.latest_generation))

    def _is_here(self, stored: StoredObject) -> bool:
        found = self._state.catalog.find(stored.key)
        return found is not None and found.generation == stored.generation

    async def _rotten(self, key: BlockKey) -> StoredObject | None:
        """None also when it has left meanwhile."""
        stored = self._state.catalog.find(key)
        if stored is None:
            return None
        self._state.moves.check(stored)
        try:
            good = await self._memory_matches(stored) and await self._disk_matches(stored)
            return None if good else stored
        finally:
            self._state.moves.checked(stored)

    async def _memory_matches(self, stored: StoredObject) -> bool:
        if stored.offset is None:
            return True
        piece = stored.bytes_in(self._memory)
        if stored.length < PIECE_BYTES // 64:
            return checksum([piece]) == stored.checksum
        return await self._in_thread(lambda: checksum([piece]) == stored.checksum)

    async def _disk_matches(self, stored: StoredObject) -> bool:
        disk = self._mover.disk
        if stored.place is None or disk is None:
            return True
        scratch = memoryview(bytearray(stored.length))
        read = DiskRead(object=stored.header(), place=stored.place, memory=scratch)
        [good] = await disk.read([read])
        fresh = self._state.catalog.find(stored.key)
        moved = fresh is None or fresh.place != stored.place  # compaction took it elsewhere
        return good or moved


# A thread to verify this much would take longer to wake than the checksum does.
VERIFY_HERE_BYTES = 4 * 2**20


class Landings:
    """What writers have put into one segment, compared with their checksums once nobody can write there any more.

    Thread-safe.
    """

    def __init__(self, transfer: TransferEngine, segment: Segment) -> None:
        self._transfer = transfer
        self._memory = segment.buffer

    def can_be_verified_here(self, window_id: int | None, landed: Sequence[StoredObject]) -> bool:
        """Whether little was written, and the window is closed now because nobody is writing."""
        if sum(item.length for item in landed) > VERIFY_HERE_BYTES:
            return False
        return window_id is None or self._transfer.close_window_if_idle(window_id)

    def close_and_verify(self, window_id: int | None, landed: Sequence[StoredObject]) -> tuple[BlockKey, ...]:
        """As `corrupt`, behind a window that is closed first; blocks."""
        if window_id is not None:
            self._transfer.close_window(window_id)
        return self.corrupt(landed)

    def corrupt(self, landed: Sequence[StoredObject]) -> tuple[BlockKey, ...]:
        """The keys whose bytes do not match."""
        return tuple(o.key for o in landed if checksum([o.bytes_in(self._memory)]) != o.checksum)
