"""Verifies objects against their checksums: all of a node, in memory and on disk, and those just written."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from moonserve.kvstore.disk.base import DiskRead
from moonserve.kvstore.node.tier_mover import TierMover
from moonserve.kvstore.state.objects import StoredObject
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey, checksum
from moonserve.protocol.pb import kvstore_pb2
from moonserve.transfer import Segment, TransferEngine

T = TypeVar("T")

# Objects of at least 1/64 of this are verified in a thread, smaller ones in the event loop.
PIECE_BYTES = 32 * 2**20


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields lists of at most `size` items, as `itertools.batched` of Python 3.12 yields tuples."""
    iterator = iter(items)
    while piece := list(islice(iterator, size)):
        yield piece


class Verifier:
    """One pass over the objects that are there at its start. Mismatching objects are removed."""

    def __init__(
        self,
        state: StoreState,
        mover: TierMover,
        segment: Segment,
        in_thread: Callable[[Callable[[], bool]], Awaitable[bool]],
    ) -> None:
        self._state = state
        self._mover = mover
        self._memory = segment.buffer
        self._in_thread = in_thread

    async def run(self) -> AsyncIterator[kvstore_pb2.StoreVerifyReply]:
        """Verifies all objects. Yields the progress after each piece."""
        keys = [stored.key for stored in self._state.catalog.objects()]
        checked = 0
        for piece in batched(keys, 1_000):
            rotten = [found for key in piece if (found := await self._corrupt_object(key)) is not None]
            await self._drop(rotten)
            checked += len(piece)
            corrupt = [stored.key for stored in rotten]
            yield kvstore_pb2.StoreVerifyReply(checked=checked, total=len(keys), corrupt=corrupt)

    async def _drop(self, rotten: list[StoredObject]) -> None:
        """Removes corrupt objects, except keys that were stored anew meanwhile."""
        corrupt = [stored.key for stored in rotten if self._is_here(stored)]
        if corrupt:
            self._state.remove(corrupt, corrupt=True)
            await self._mover.forget(dict.fromkeys(corrupt, self._state.catalog.latest_generation))

    def _is_here(self, stored: StoredObject) -> bool:
        found = self._state.catalog.find(stored.key)
        return found is not None and found.generation == stored.generation

    async def _corrupt_object(self, key: BlockKey) -> StoredObject | None:
        """Returns the object of `key` if it is corrupt; None if it is intact or gone."""
        stored = self._state.catalog.find(key)
        if stored is None:
            return None
        self._state.tier_moves.hold_for_check(stored)
        try:
            good = await self._memory_matches(stored) and await self._disk_matches(stored)
            return None if good else stored
        finally:
            self._state.tier_moves.release_after_check(stored)

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
        moved = fresh is None or fresh.place != stored.place  # by compaction during the read
        return good or moved


# Up to this size, the checksum takes less time than waking a thread.
VERIFY_IN_LOOP_BYTES = 4 * 2**20


class PutVerifier:
    """Verifies what writers have written into one segment, once their windows are closed. Thread-safe."""

    def __init__(self, transfer: TransferEngine, segment: Segment) -> None:
        self._transfer = transfer
        self._memory = segment.buffer

    def close_if_small(self, window_id: int | None, landed: Sequence[StoredObject]) -> bool:
        """Closes an idle window if little was written. Returns True if the window is closed."""
        if sum(item.length for item in landed) > VERIFY_IN_LOOP_BYTES:
            return False
        return window_id is None or self._transfer.close_window_if_idle(window_id)

    def close_and_verify(self, window_id: int | None, landed: Sequence[StoredObject]) -> tuple[BlockKey, ...]:
        """Closes the window, then verifies. Returns the corrupt keys. Blocks."""
        if window_id is not None:
            self._transfer.close_window(window_id)
        return self.corrupt_keys(landed)

    def corrupt_keys(self, landed: Sequence[StoredObject]) -> tuple[BlockKey, ...]:
        """Returns the keys whose bytes do not match their checksum."""
        return tuple(o.key for o in landed if checksum([o.bytes_in(self._memory)]) != o.checksum)
