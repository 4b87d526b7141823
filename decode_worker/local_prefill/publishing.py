"""Publishes blocks that were computed here: seals them, makes them findable in the pool, puts them into stores. Pure.

Owns the references to blocks whose checksum is being computed and to blocks that are being put. New blocks of a prompt
are put into the store of its prefix, so that chains stay together. If its prefix has none, they are put into the home
store, if there is one. Does not know requests.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import PutBlocks, PutDone, PutFailed, PutItem
from moonserve.prefill_worker.decisions.write_behind import WriteBehind
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.request import BlockId, CacheHints, Endpoint
from moonserve.worker.events import Action, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(Event):
    """Answer to SealBlocks: checksums, in the order of its blocks."""

    seal_id: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PutEnded(Event):
    """Outcome of a put to this store."""

    store_id: str
    outcome: PutDone | PutFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class SealBlocks(Action):
    """Compute the checksums of these whole blocks, which are no longer written → Sealed."""

    seal_id: int
    blocks: tuple[BlockId, ...]


class NewBlock(NamedTuple):
    """A whole block with its KV, its key and its parent's key."""

    block: BlockId
    key: BlockKey
    parent: BlockKey | None
    hints: CacheHints


class _Seal(NamedTuple):
    items: tuple[NewBlock, ...]
    store: Endpoint | None  # None = the home store


class BlockPublisher:
    """Publication for one pool. `max_in_flight`, `max_pending`: blocks per store, as for a prefill worker's puts."""

    def __init__(self, pool: BlockPool, *, max_in_flight: int = 64, max_pending: int = 4096) -> None:
        self.counters: Counter[str] = Counter()
        self._pool = pool
        self._limits = {"max_in_flight": max_in_flight, "max_pending": max_pending}
        self._seals: dict[int, _Seal] = {}
        self._num_seals = 0
        self._stores: dict[str, WriteBehind] = {}
        self._home_id: str | None = None

    @property
    def is_idle(self) -> bool:
        """True if this object holds no references to blocks."""
        return not any(self.held_blocks())

    def held_blocks(self) -> Iterator[list[BlockId]]:
        """Yields the blocks to which this object holds references."""
        yield from ([item.block for item in seal.items] for seal in self._seals.values())
        yield from (blocks for puts in self._stores.values() if (blocks := puts.held_blocks()))

    def on_store_found(self, store: Endpoint) -> None:
        """Notes that the store can be reached (again)."""
        self._puts_to(store.instance_id).on_store_found(store)

    def on_home_found(self, store: Endpoint) -> None:
        """Notes that the home store can be reached. It is for new blocks of prompts whose prefix has no store."""
        self._home_id = store.instance_id
        self.on_store_found(store)

    def seal(self, items: Sequence[NewBlock], store: Endpoint | None) -> SealBlocks:
        """Takes references to blocks that have their KV, and returns the action to seal them. The caller holds them."""
        self._pool.retain(item.block for item in items)
        self._num_seals += 1
        self._seals[self._num_seals] = _Seal(tuple(items), store)
        return SealBlocks(seal_id=self._num_seals, blocks=tuple(item.block for item in items))

    def on_sealed(self, event: Sealed) -> None:
        """Makes sealed blocks findable, queues them for their store, and releases the references of the seal."""
        items, store = self._seals.pop(event.seal_id)
        store_id = self._home_id if store is None else store.instance_id
        puts = None if store_id is None else self._puts_to(store_id)
        for (block, key, parent, hints), checksum in zip(items, event.checksums, strict=True):
            if self._pool.key_of(block) is None:
                self._pool.publish(block, key, NO_PARENT if parent is None else parent, checksum)
            if puts is not None and self._pool.key_of(block) == key:
                puts.enqueue(PutItem(key=key, parent=parent, checksum=checksum, block=block, hints=hints))
        self._pool.release([item.block for item in items])

    def on_put_ended(self, event: PutEnded) -> None:
        puts = self._stores[event.store_id]
        if isinstance(event.outcome, PutFailed):
            puts.on_put_failed(event.outcome)
        else:
            puts.on_put_done(event.outcome)

    def on_evicted(self, key: BlockKey) -> None:
        """Notes that the pool can no longer serve this block."""
        for puts in self._stores.values():
            puts.on_evicted(key)

    def due_puts(self) -> list[PutBlocks]:
        """Returns the puts that are due, with references taken."""
        due = (puts.start() for puts in self._stores.values())
        return [put for put in due if put is not None]

    def _puts_to(self, store_id: str) -> WriteBehind:
        puts = self._stores.get(store_id)
        if puts is None:
            puts = self._stores[store_id] = WriteBehind(self._pool, self.counters, **self._limits)
        return puts

    def validate(self) -> None:
        """Raises AssertionError if a bound is exceeded or the bookkeeping is inconsistent."""
        for puts in self._stores.values():
            puts.validate()
        for blocks in self.held_blocks():
            assert all(self._pool.references_of(block) for block in blocks)
