"""State shared by the parts of a prefill worker's automaton: sequences, their blocks, and how a sequence ends.

`preparation`, `steps` and `handoffs` move sequences through some phases each, and all of them end sequences here.
Blocks go back to the pool only when no operation in flight uses them.
"""

from collections import Counter
from dataclasses import dataclass

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions.events import PutItem, ReleaseLanding, WithdrawReservation
from moonserve.prefill_worker.decisions.load_or_compute import LayerTurns, PrefixLoads
from moonserve.prefill_worker.decisions.request_queue import Prefetches, RequestQueue
from moonserve.prefill_worker.decisions.sequence import ENDED, Phase, Sequence
from moonserve.prefill_worker.decisions.write_behind import MIN_HITS_BY_MODE, WriteBehind
from moonserve.protocol.errors import InvalidRequest, MoonserveError, PeerError
from moonserve.protocol.kv_blocks import NO_PARENT
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.alarms_and_tombstones import Tombstones
from moonserve.worker.events import Action, Fail, Submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Scheduling limits of a prefill worker."""

    block_size: int
    block_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    prepare_ahead: int = 4  # minimum number of requests prepared ahead of the step in flight
    max_put_blocks: int = 64
    max_pending_puts: int = 4096
    max_prefetch_blocks: int = 64
    num_layers: int = 1  # layers of the model, for layered loads
    store_reads: str = "auto"  # "auto" (by predicted time), "always" or "never"
    layered_loads: str = "auto"  # "auto" (by predicted gain), "always" or "never"
    # An early step may wait this much longer than missing layers should take, for stalls of a busy machine.
    spare_wait_s: float = 0.1
    num_stages: int = 1  # stages of a pipeline; as many steps can be in flight
    computes_before_grant: bool = False  # an idle engine does not wait for the landing; not with several stages
    policy: str = "fcfs"
    store_writes: str = "all"

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)


class SharedState:
    """The sequences, blocks and counters, and the actions (`out`) that the current event has caused so far."""

    def __init__(self, pool: BlockPool, limits: Limits, *, profile: PrefillProfile, home_store: str | None) -> None:
        self.pool = pool
        self.limits = limits
        self.home_store = home_store
        self.counters: Counter[str] = Counter()
        self.write_behind = WriteBehind(
            self.pool,
            self.counters,
            max_in_flight=limits.max_put_blocks,
            max_pending=limits.max_pending_puts,
            min_hits=MIN_HITS_BY_MODE[limits.store_writes],
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
        self.resubmitted: list[Submitted] = []  # successors whose turn has come
        self.out: list[Action] = []

    # -- the queue

    def enqueue(self, sequence: Sequence) -> None:
        """Registers a QUEUED sequence."""
        self.sequences[sequence.request_id] = sequence
        self.queue.push(sequence)
        self.prefetches.add(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Moves a sequence from the queue to `admitted`. Call before it leaves the phase QUEUED."""
        self.queue.remove(sequence)
        self.prefetches.remove(sequence)
        self.admitted[sequence.request_id] = sequence

    # -- blocks

    def error_if_too_long(self, sequence: Sequence) -> InvalidRequest | None:
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
        """Records a complete block's checksum. If the block is full and may be kept, makes it findable for others."""
        sequence.checksums[index] = checksum
        if index < len(sequence.request.block_keys) and sequence.request.cache_hints.store:
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
            self.close_if_unused(sequence, now)
            return
        self.counters[f"failed_{error.code}"] += 1
        self.report_failure(sequence, error)
        self.end(sequence, now)

    def report_failure(self, sequence: Sequence, error: MoonserveError) -> None:
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
        self.close_if_unused(sequence, now)

    def close_if_unused(self, sequence: Sequence, now: float) -> None:
        """Closes an ended sequence and releases all it holds, unless an operation in flight uses its blocks."""
        if sequence.phase is not Phase.CLOSING or sequence.is_busy:
            return
        sequence.enter(Phase.CLOSED, now)
        self._queue_store_writes(sequence)
        self.pool.release(sequence.block_table)
        # Also after a refusal: the lease may have been granted and the answer lost. Releasing is idempotent.
        if sequence.needs_landing and sequence.block_table and not sequence.handed_off:
            decode = sequence.placement.decode
            self.out.append(ReleaseLanding(request_id=sequence.request_id, decode=decode, lease_id=sequence.lease_id))
        del self.sequences[sequence.request_id], self.admitted[sequence.request_id]
        self.tombstones.remember_request(sequence.request_id, now)
        successor = self.successors.pop(sequence.request_id, None)
        if successor is not None:
            self.resubmitted.append(successor)

    def _queue_store_writes(self, sequence: Sequence) -> None:
        hints = sequence.request.cache_hints
        if self.home_store is None or not hints.store:
            return
        keyed = zip(sequence.request.block_keys, sequence.block_table, strict=False)
        last = len(sequence.request.block_keys) - 1
        for index, (key, block) in enumerate(keyed):
            checksum = self.pool.checksum_of(block)
            if checksum is not None and self.pool.key_of(block) == key:
                parent = sequence.parent_key(index)
                of_block = hints if index == last else hints.without_return()
                self.write_behind.enqueue(
                    PutItem(key=key, parent=parent, checksum=checksum, block=block, hints=of_block)
                )


def _loads(limits: Limits, profile: PrefillProfile) -> PrefixLoads:
    return PrefixLoads(
        profile,
        LayerTurns(limits.num_layers, limits.layered_loads),
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
