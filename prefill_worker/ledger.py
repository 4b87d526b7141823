"""State shared by the parts of a prefill worker's automaton: sequences, their blocks, and how a sequence ends.

`preparation`, `steps` and `handoffs` move sequences through some phases each, and all of them end sequences here.
Blocks go back to the pool only when no operation in flight uses them. `Prefetches` requests loads from the stores'
disks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.block_pool import BlockPool
from prefill_worker.actions import (
    PrefetchPart,
    PrefetchPrefix,
    PutItem,
    ReleaseLanding,
    WithdrawReservation,
)
from prefill_worker.load_or_compute import Layers, PrefixLoads
from prefill_worker.puts import MIN_HITS, WriteBehind
from prefill_worker.sequence import ENDED, Phase, Rank, Sequence
from protocol.errors import InvalidRequest, MoonserveError, PeerError
from protocol.ids import RequestId
from protocol.keys import NO_PARENT
from protocol.profile import PrefillProfile
from worker.alarms import Tombstones
from worker.events import Action, Fail, Submitted


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Scheduling limits of a prefill worker."""

    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    lookahead: int = 4  # minimum number of requests prepared ahead of the step in flight
    max_put_blocks: int = 64
    max_pending_puts: int = 4096
    max_prefetch_blocks: int = 64
    num_layers: int = 1  # layers of the model, for layered loads
    store_reads: str = "auto"  # "auto" (by predicted time), "always" or "never"
    layered_loads: str = "auto"  # "auto" (by predicted gain), "always" or "never"
    # An early step may wait this much longer than missing layers should take, for stalls of a busy machine.
    spare_wait_s: float = 0.1
    num_stages: int = 1  # stages of a pipeline; as many steps can be in flight
    policy: str = "fcfs"
    store_writes: str = "all"

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)


class Ledger:
    """The sequences, blocks and counters, and the actions (`out`) that the current event has caused so far."""

    def __init__(self, pool: BlockPool, limits: Limits, *, profile: PrefillProfile, home_store: str | None) -> None:
        self.pool = pool
        self.limits = limits
        self.home_store = home_store
        self.counters: Counter[str] = Counter()
        self.puts = WriteBehind(
            self.pool,
            self.counters,
            max_in_flight=limits.max_put_blocks,
            max_pending=limits.max_pending_puts,
            min_hits=MIN_HITS[limits.store_writes],
        )
        self.loads = _loads(limits, profile)
        self.prefetches = Prefetches(
            self.pool,
            self.counters,
            block_size=limits.block_size,
            max_blocks=limits.max_prefetch_blocks,
        )
        self.sequences: dict[RequestId, Sequence] = {}
        self.queue = RequestQueue()  # QUEUED sequences
        self.admitted: dict[RequestId, Sequence] = {}  # all other sequences
        self.tombstones = Tombstones()
        # Requests that were placed here again before their earlier attempt had closed.
        self.successors: dict[RequestId, Submitted] = {}
        self.returned: list[Submitted] = []  # successors whose turn has come
        self.out: list[Action] = []

    # -- the queue

    def enqueue(self, sequence: Sequence) -> None:
        """Registers a QUEUED sequence."""
        self.sequences[sequence.request_id] = sequence
        self.queue.push(sequence)
        self.prefetches.waits(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Moves a sequence from the queue to `admitted`. Call before it leaves the phase QUEUED."""
        self.queue.remove(sequence)
        self.prefetches.leaves(sequence)
        self.admitted[sequence.request_id] = sequence

    # -- blocks

    def too_long(self, sequence: Sequence) -> InvalidRequest | None:
        """Returns an error if the sequence needs more blocks than the pool can ever hold, else None."""
        num_needed = self.limits.blocks_for(sequence.num_tokens)
        if num_needed <= (capacity := self.pool.capacity):
            return None
        return InvalidRequest(
            f"the prompt needs {num_needed} KV blocks and the worker has {capacity}; "
            "shorten it, or start workers with a larger --kv-cache-memory",
            request=sequence.request_id,
        )

    def publish(self, sequence: Sequence, index: int, checksum: int) -> None:
        """Records a complete block's checksum. If the block is full, makes it findable for other sequences."""
        sequence.checksums[index] = checksum
        if index < len(sequence.request.block_keys):
            key, parent = sequence.request.block_keys[index], sequence.parent_key(index)
            self.pool.publish(sequence.block_table[index], key, parent or NO_PARENT, checksum)

    def adopt_cached(self, sequence: Sequence, first: int, end: int) -> None:
        """Records that the blocks [first, end) of the table came from the prefix cache. Their writers' checksums are
        kept: new checksums would hide any corruption since."""
        for index in range(first, end):
            checksum = self.pool.checksum_of(sequence.block_table[index])
            assert checksum is not None, "a findable block has a checksum"
            sequence.checksums[index] = checksum
        sequence.num_computed = sequence.num_cached = end * self.limits.block_size
        self.counters["device_hit_blocks"] += end - first

    # -- ending

    def fail(self, sequence: Sequence, error: MoonserveError, now: float) -> None:
        """Ends a sequence with an error, which is sent to its gateway. A sequence that has ended is only closed."""
        if sequence.phase in ENDED:
            self.close_if_quiet(sequence, now)
            return
        self.counters[f"failed_{error.code}"] += 1
        self.tell_failed(sequence, error)
        self.end(sequence, now)

    def tell_failed(self, sequence: Sequence, error: MoonserveError) -> None:
        gateway_id = sequence.request.gateway_id
        self.out.append(Fail(gateway_id=gateway_id, request_id=sequence.request_id, error=error))

    def cancel(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence whose result is not wanted any more."""
        self.counters[f"cancelled_{sequence.phase}"] += 1
        self.end(sequence, now)

    def end(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence for its client; it stays CLOSING while operations in flight use its blocks."""
        if sequence.phase is Phase.QUEUED:
            self.dequeue(sequence)
        sequence.enter(Phase.CLOSING, now)
        if sequence.is_reserving:
            self.out.append(WithdrawReservation(request_id=sequence.request_id))
        self.close_if_quiet(sequence, now)

    def close_if_quiet(self, sequence: Sequence, now: float) -> None:
        """Closes an ended sequence and releases all it holds, unless an operation in flight uses its blocks."""
        if sequence.phase is not Phase.CLOSING or sequence.is_busy:
            return
        sequence.enter(Phase.CLOSED, now)
        self._offer_to_store(sequence)
        self.pool.release(sequence.block_table)
        self._release_landing(sequence)
        del self.sequences[sequence.request_id], self.admitted[sequence.request_id]
        self.tombstones.seen(sequence.request_id, now)
        successor = self.successors.pop(sequence.request_id, None)
        if successor is not None:
            self.returned.append(successor)

    def _release_landing(self, sequence: Sequence) -> None:
        # Also after a refusal: the lease may have been granted and the answer lost. Releasing is idempotent.
        was_asked_for = sequence.needs_landing and bool(sequence.block_table)
        if was_asked_for and not sequence.handed_off:
            decode = sequence.placement.decode
            self.out.append(ReleaseLanding(request_id=sequence.request_id, decode=decode, lease_id=sequence.lease_id))

    def _offer_to_store(self, sequence: Sequence) -> None:
        if self.home_store is None:
            return
        keyed = zip(sequence.request.block_keys, sequence.block_table, strict=False)
        for index, (key, block) in enumerate(keyed):
            checksum = self.pool.checksum_of(block)
            if checksum is not None and self.pool.key_of(block) == key:
                parent = sequence.parent_key(index)
                self.puts.offer(PutItem(key=key, parent=parent, checksum=checksum, block=block))


def _loads(limits: Limits, profile: PrefillProfile) -> PrefixLoads:
    return PrefixLoads(
        profile,
        Layers(limits.num_layers, limits.layered_loads),
        reads=limits.store_reads,
        block_bytes=limits.block_bytes,
        block_size=limits.block_size,
        chunk_tokens=limits.max_num_batched_tokens,
    )


def as_retryable(error: MoonserveError) -> MoonserveError:
    """Returns a peer's refusal as a retryable error for the gateway, since another placement may succeed. Errors of
    the request itself stay as they are."""
    if error.retryable or isinstance(error, InvalidRequest):
        return error
    return PeerError(f"the decode worker refused: {error.message}", **error.ids)


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
        self._asked: dict[RequestId, int] = {}  # number of blocks requested
        self._num_asked = 0

    def waits(self, sequence: Sequence) -> None:
        """Adds a sequence that has entered the queue."""
        if sequence.placement.prefix_sources:
            self._candidates.push(sequence)

    def leaves(self, sequence: Sequence) -> None:
        """Removes a sequence that has left the queue."""
        num_blocks = self._asked.pop(sequence.request_id, None)
        if num_blocks is not None:
            self._num_asked -= num_blocks
        elif sequence.placement.prefix_sources:
            self._candidates.remove(sequence)

    def start(self) -> list[PrefetchPrefix]:
        """Returns the prefetches to request now."""
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
        """Returns True if all the sequence's blocks fit within `max_blocks`, or if no other block is requested."""
        if self._num_asked == 0:
            return self._max_blocks > 0
        offered = sum(source.num_blocks for source in sequence.placement.prefix_sources)
        return self._num_asked + offered <= self._max_blocks

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
        assert not candidates & set(self._asked), "asked for and still to be asked for"
        assert candidates | set(self._asked) <= set(waiting), "a prefetch for what does not wait"
        assert self._num_asked == sum(self._asked.values())
        assert self._num_asked <= self._max_blocks
