"""The queue of prompts by rank, and prefetches of the waiting prompts' blocks from the stores' disks."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import PrefetchPart, PrefetchPrefix
from moonserve.prefill_worker.decisions.sequence import Rank, Sequence
from moonserve.protocol.request import RequestId


class RequestQueue:
    """Requests that wait for blocks, by rank. They can be removed from any place.

    A rank is: priority (0 for fcfs), time of arrival + seconds to yield (`Placement.rank`, below 0 if the tenant has
    been served less), number of arrival. A later request overtakes only if the conductor ranks it before. A head that
    waits for blocks is not passed by the requests behind it."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, RequestId]] = []
        self._waiting: dict[RequestId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the waiting sequences in no particular order."""
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence.request_id))

    def head(self) -> Sequence | None:
        """Returns the next sequence without removing it, or None."""
        while self._heap:
            rank, request_id = self._heap[0]
            sequence = self._waiting.get(request_id)
            if sequence is not None and sequence.rank == rank:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from any place in the queue."""
        del self._waiting[sequence.request_id]


class Prefetches:
    """Prefetches of QUEUED sequences' blocks from the stores' disks to their memory, in the order of the queue.

    A prefetch is requested once per sequence, when the sequence is near enough to the queue's head: the blocks that are
    requested for waiting sequences are at most `max_blocks`, a share of the worker's own pool. Sequences further back
    start only after that much of the pool has turned over. Prefetches for a whole long queue would evict from a store's
    memory what the queue's head is about to read. Nothing depends on whether a store complies.
    """

    def __init__(self, pool: BlockPool, counters: Counter[str], *, block_size: int, max_blocks: int) -> None:
        self._pool = pool
        self._counters = counters
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._candidates = RequestQueue()
        self._requested: dict[RequestId, int] = {}  # number of blocks requested
        self._num_requested = 0

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that has entered the queue."""
        if sequence.placement.prefix_sources:
            self._candidates.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has left the queue."""
        num_blocks = self._requested.pop(sequence.request_id, None)
        if num_blocks is not None:
            self._num_requested -= num_blocks
        elif sequence.placement.prefix_sources:
            self._candidates.remove(sequence)

    def start(self) -> list[PrefetchPrefix]:
        """Returns the prefetches to request now."""
        actions: list[PrefetchPrefix] = []
        while (sequence := self._candidates.head()) is not None and self._has_room_for(sequence):
            self._candidates.remove(sequence)
            parts = self._parts(sequence)
            num_blocks = sum(len(part.keys) for part in parts)
            self._requested[sequence.request_id] = num_blocks
            self._num_requested += num_blocks
            if parts:
                self._counters["prefetched_blocks"] += num_blocks
                actions.append(PrefetchPrefix(request_id=sequence.request_id, parts=parts))
        return actions

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Returns True if all the sequence's blocks fit within `max_blocks`, or if no other block is requested."""
        if self._num_requested == 0:
            return self._max_blocks > 0
        offered = sum(source.num_blocks for source in sequence.placement.prefix_sources)
        return self._num_requested + offered <= self._max_blocks

    def _parts(self, sequence: Sequence) -> tuple[PrefetchPart, ...]:
        """Returns the blocks that the sources hold behind those in the device cache, at most `max_blocks` of them."""
        keys = sequence.usable_keys(self._block_size)
        first = len(self._pool.match_prefix(keys))
        limit = first + self._max_blocks
        runs = ((store, start, min(end, limit)) for store, start, end in sequence.source_runs(first, self._block_size))
        return tuple(PrefetchPart(store=store, keys=keys[start:end]) for store, start, end in runs if start < end)

    def validate(self, waiting: Iterable[RequestId]) -> None:
        """Raises AssertionError unless only waiting sequences are known and their blocks are counted correctly."""
        candidates = {sequence.request_id for sequence in self._candidates}
        assert not candidates & set(self._requested), "asked for and still to be asked for"
        assert candidates | set(self._requested) <= set(waiting), "a prefetch for what does not wait"
        assert self._num_requested == sum(self._requested.values())
        assert self._num_requested <= self._max_blocks
