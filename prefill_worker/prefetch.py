"""Asking stores to bring to memory, from disk, what waiting requests will read. Pure.

A request is asked for once, when it comes within reach of the queue's head; what is prepared already reads instead.
Reach is counted in blocks: those asked for and still waiting are at most `max_blocks`, a share of the worker's own pool
(prefill_worker.config). A request waits because the pool is full or because enough is prepared ahead of it, so what
lies further back starts only after that much of the pool has turned over, and its turn to be asked for comes long
before. Asking for the whole of a long queue would drive out of a store's memory, for the sake of its end, what its head
is about to read. Nothing depends on whether a store obeys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.block_pool import BlockPool
from prefill_worker.actions import PrefetchPart, PrefetchPrefix
from prefill_worker.queue import RequestQueue
from prefill_worker.sequence import Sequence
from protocol.ids import RequestId


class Prefetches:
    """What was asked for, of the sequences that are QUEUED. They are taken in the order of the queue."""

    def __init__(
        self, pool: BlockPool, counters: Counter[str], *, block_size: int, max_blocks: int
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._candidates = RequestQueue()
        self._asked: dict[RequestId, int] = {}  # blocks
        self._num_asked = 0

    def waits(self, sequence: Sequence) -> None:
        """A sequence came into the queue."""
        if sequence.placement.prefix_sources:
            self._candidates.push(sequence)

    def leaves(self, sequence: Sequence) -> None:
        """A sequence left the queue, for whatever reason."""
        num_blocks = self._asked.pop(sequence.request_id, None)
        if num_blocks is not None:
            self._num_asked -= num_blocks
        elif sequence.placement.prefix_sources:
            self._candidates.remove(sequence)

    def start(self) -> list[PrefetchPrefix]:
        """What is to be asked for now."""
        actions: list[PrefetchPrefix] = []
        while (sequence := self._candidates.head()) is not None and self._has_room_for(sequence):
            self._candidates.remove(sequence)
            parts = self._parts(sequence)
            num_blocks = sum(len(part.keys) for part in parts)
            self._asked[sequence.request_id] = num_blocks
            self._num_asked += num_blocks
            if parts:
                self._counters["prefetched_blocks"] += num_blocks
                actions.append(PrefetchPrefix(request_id=sequence.request_id, parts=parts))
        return actions

    def _has_room_for(self, sequence: Sequence) -> bool:
        """Asked for as a whole, save for one that is larger than all the room there is."""
        if self._num_asked == 0:
            return self._max_blocks > 0
        offered = sum(source.num_blocks for source in sequence.placement.prefix_sources)
        return self._num_asked + offered <= self._max_blocks

    def _parts(self, sequence: Sequence) -> tuple[PrefetchPart, ...]:
        """What the sources hold beyond the device cache."""
        keys = sequence.usable_keys(self._block_size)
        first = len(self._pool.match_prefix(keys))
        limit = first + self._max_blocks
        runs = (
            (store, start, min(end, limit))
            for store, start, end in sequence.source_runs(first, self._block_size)
        )
        return tuple(
            PrefetchPart(store=store, keys=keys[start:end])
            for store, start, end in runs
            if start < end
        )

    def validate(self, waiting: Iterable[RequestId]) -> None:
        """Raises AssertionError unless exactly what waits is known, and its blocks are counted right."""
        candidates = {sequence.request_id for sequence in self._candidates}
        assert not candidates & set(self._asked), "asked for and still to be asked for"
        assert candidates | set(self._asked) <= set(waiting), "a prefetch for what does not wait"
        assert self._num_asked == sum(self._asked.values())
        assert self._num_asked <= self._max_blocks
