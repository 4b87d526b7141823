"""Write-behind of computed blocks to the home store.

Owns the queue of blocks to put and the put in flight. It never delays a request: pending blocks hold no references, so
the pool may evict them first. Both pending and in-flight blocks are bounded; blocks above the bound are dropped and
counted. A block that the store is known to have is not put again until the pool evicts it or the store restarts.
"""

from collections import Counter, deque

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import PutBlocks, PutDone, PutFailed, PutItem
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import BlockId, CacheHints, Endpoint

MIN_HITS_BY_MODE = {"all": 0, "hot": 1}
"""Minimum reuses before a block is put, by `--store-writes` (measured: docs/engine-performance.md)."""


class WriteBehind:
    """Queue of puts. At most one put is in flight, so that puts use at most one core's idle time."""

    def __init__(
        self,
        pool: BlockPool,
        counters: Counter[str],
        *,
        max_in_flight: int,
        max_pending: int,
        min_hits: int = 0,
    ) -> None:
        """`min_hits`: number of reuses since it was published that a block needs before it is put."""
        self._pool = pool
        self._min_hits = min_hits
        self._counters = counters
        self._max_in_flight = max_in_flight
        self._max_pending = max_pending
        self._home: Endpoint | None = None
        self._pending: deque[PutItem] = deque()
        self._in_flight: PutBlocks | None = None
        self._known: set[BlockKey] = set()  # in the store, pending or in flight
        self._num_puts = 0

    def on_store_found(self, store: Endpoint) -> None:
        """Records the home store, which is reachable (again). A new epoch is an empty store."""
        if self._home is None or self._home.epoch != store.epoch:
            self._known = {item.key for item in self._pending}
        self._home = store

    @property
    def needs_home(self) -> bool:
        return self._home is None

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def held_blocks(self) -> list[BlockId]:
        """Returns the blocks to which this object holds references."""
        return [item.block for item in self._in_flight.items] if self._in_flight else []

    def mark_stored(self, key: BlockKey) -> None:
        """Records that the home store has this block."""
        self._known.add(key)

    def on_evicted(self, key: BlockKey) -> None:
        """Forgets a block that the pool has evicted. Evictions by the store are not tracked."""
        self._known.discard(key)

    def enqueue(self, item: PutItem) -> None:
        """Queues a published block, unless the store is known to have it or it has too few reuses."""
        if item.key in self._known or self._pool.hits_of(item.block) < self._min_hits:
            return
        if len(self._pending) >= self._max_pending:
            self._counters["put_dropped_blocks"] += 1
            return
        self._known.add(item.key)
        self._pending.append(item)

    def start(self) -> PutBlocks | None:
        """Returns the next put, with references taken. Returns None if a put is in flight or there is no store."""
        if self._in_flight is not None or self._home is None:
            return None
        items = self._take()
        if not items:
            return None
        self._pool.retain(item.block for item in items)
        self._num_puts += 1
        self._in_flight = PutBlocks(put_id=self._num_puts, store=self._home, items=items)
        return self._in_flight

    def _take(self) -> tuple[PutItem, ...]:
        """Removes the next blocks from the queue and returns those that the pool has not evicted meanwhile."""
        items: list[PutItem] = []
        while self._pending and len(items) < self._max_in_flight:
            if items and not _may_follow(items[-1].hints, self._pending[0].hints):
                break
            item = self._pending.popleft()
            if self._pool.key_of(item.block) == item.key:
                items.append(item)
            else:
                self._counters["put_dropped_blocks"] += 1
        return tuple(items)

    def on_put_done(self, event: PutDone) -> None:
        """Handles a finished put. Corrupt blocks are also forgotten in the pool, since their source is suspect."""
        put = self._finish(event.put_id)
        corrupt = set(event.corrupt)
        for item in put.items:
            if item.key in corrupt and self._pool.key_of(item.block) == item.key:
                self._pool.uncache(item.block)
        if event.num_refused:  # the store does not report which blocks it refused, so none counts as stored
            self._known.difference_update(item.key for item in put.items)
        self._counters["integrity_failures"] += len(corrupt)
        self._counters["put_refused_blocks"] += event.num_refused
        self._counters["put_blocks"] += len(put.items) - event.num_refused - len(corrupt)

    def on_put_failed(self, event: PutFailed) -> None:
        """Handles a failed put. No further put starts before the next `on_store_found`."""
        put = self._finish(event.put_id)
        self._known.difference_update(item.key for item in put.items)
        self._counters["put_dropped_blocks"] += len(put.items)
        self._home = None

    def _finish(self, put_id: int) -> PutBlocks:
        put = self._in_flight
        if put is None or put.put_id != put_id:
            raise ValueError(f"put {put_id} is not in flight")
        self._in_flight = None
        self._pool.release([item.block for item in put.items])
        return put

    def validate(self) -> None:
        """Raises AssertionError if a bound is exceeded or a block in flight has no reference."""
        assert len(self._pending) <= self._max_pending, "too many puts pending"
        assert len(self.held_blocks()) <= self._max_in_flight, "too many puts in flight"
        assert all(self._pool.references_of(block) for block in self.held_blocks())


def _may_follow(before: CacheHints, hints: CacheHints) -> bool:
    """Returns True if two blocks fit into one put, whose hints are those of its last block."""
    return before.return_within_s is None and before == hints.without_return()
