"""Preparation of the requests that run next: blocks, landing and prefix (QUEUED → RESERVING → LOADING → READY).

Requests are prepared while earlier ones compute: enough of them to keep the engine busy, and not more, since a prepared
request holds blocks here and on the decode worker.
"""

from collections.abc import Callable

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import (
    LoadPrefix,
    PrefixPart,
    ReserveLanding,
    SendBlocks,
    SendStep,
    SkipPrefix,
)
from moonserve.prefill_worker.decisions.sequence import ENDED, PREPARED, LoadProgress, Phase, Sequence
from moonserve.prefill_worker.decisions.shared_state import SharedState, as_retryable
from moonserve.protocol.errors import Cancelled, PeerError


class Preparation:
    """Moves sequences from the queue to READY."""

    def __init__(self, shared: SharedState, on_computed: Callable[[Sequence, float], None]) -> None:
        """`on_computed` is called for a sequence that was computed before its landing was granted."""
        self._shared = shared
        self._on_computed = on_computed

    def admit(self, now: float) -> None:
        """Gives blocks to the head of the queue and prepares it, while little work is prepared ahead of it."""
        shared, limits = self._shared, self._shared.limits
        prepared = [
            s for s in shared.admitted.values() if s.phase in PREPARED or (s.is_reserving and s.phase not in ENDED)
        ]
        while len(prepared) < limits.max_num_seqs:
            sequence = shared.queue.head()
            if sequence is None or not self._is_due(sequence, prepared):
                return
            if not self._take_blocks(sequence):
                error = shared.error_if_too_long(
                    sequence
                )  # the capacity of elastic memory may have shrunk since it arrived
                if error is None:
                    return
                shared.fail(sequence, error, now)
                continue
            shared.dequeue(sequence)
            self._prepare(sequence, now)
            prepared.append(sequence)

    def _is_due(self, sequence: Sequence, prepared: list[Sequence]) -> bool:
        """Returns True if little prepared work ranks before the sequence. Work that it overtakes does not count. What
        was computed before its landing counts whole: decode workers that are full need no more of it."""
        limits = self._shared.limits
        ahead = [s.num_left or s.num_tokens for s in prepared if s.rank < sequence.rank]
        return len(ahead) < limits.prepare_ahead or sum(ahead) < limits.max_num_batched_tokens

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Takes cached blocks of the prompt and fresh ones for the rest, or returns False and takes none. A prompt that
        is alone may use the reserve, since nothing else would free blocks for it."""
        limits, pool = self._shared.limits, self._shared.pool
        cached = pool.match_prefix(sequence.usable_keys(limits.block_size))
        pool.retain(cached)
        fresh = pool.allocate(
            limits.blocks_for(sequence.num_tokens) - len(cached),
            leave_reserve=sequence.request.priority >= 0 and bool(self._shared.admitted),
        )
        if fresh is None:
            pool.release(cached)
            return False
        pool.count_hits(cached)
        sequence.block_table = cached + fresh
        self._shared.adopt_cached(sequence, 0, len(cached))
        return True

    def _prepare(self, sequence: Sequence, now: float) -> None:
        sequence.admitted_at = now
        if sequence.needs_landing:
            sequence.is_reserving = True
            sequence.enter(Phase.RESERVING, now)
            self._shared.out.append(_reservation(sequence, now))
        parts = prefix_parts(sequence, self._shared.limits.block_size)
        if parts:
            self._load_or_compute(sequence, parts, now)
        self._proceed(sequence, now)

    def _load_or_compute(self, sequence: Sequence, parts: tuple[PrefixPart, ...], now: float) -> None:
        shared, request_id = self._shared, sequence.request_id
        choice = shared.loads.choose(
            [(part.store, len(part.keys)) for part in parts],
            reader_host=sequence.placement.prefill.host,
            num_tokens=sequence.num_tokens,
            num_cached=sequence.num_computed,
            busy_s=self._busy_s(sequence),
            now=now,
        )
        sequence.load_choice = choice
        shared.counters["loads_skipped"] += choice.num_skipped
        if choice.num_parts == 0:
            shared.out.append(SkipPrefix(request_id=request_id, choice=choice))
            return
        chosen = parts[: choice.num_parts]
        sequence.is_loading = True
        sequence.num_loading = sum(len(part.keys) for part in chosen) * shared.limits.block_size
        shared.out.append(LoadPrefix(request_id=request_id, parts=chosen, choice=choice))

    def _busy_s(self, sequence: Sequence) -> float:
        """Returns the seconds that the engine computes for earlier-ranked sequences. Loads in flight count as done."""
        profile = self._shared.loads.profile
        return sum(
            profile.seconds(s.num_tokens, s.num_computed + s.num_loading)
            for s in self._shared.admitted.values()
            if s.rank < sequence.rank and s.phase not in ENDED and s.num_left
        )

    def _proceed(self, sequence: Sequence, now: float) -> None:
        """Moves a sequence to its next phase if its reservation or load has ended."""
        if sequence.phase is Phase.CLOSING:
            self._shared.close_if_unused(sequence, now)
        elif sequence.is_loading and not sequence.is_reserving:
            sequence.enter(Phase.LOADING, now)
        elif not sequence.is_reserving:
            make_ready(self._shared, sequence, now)

    def landing_granted(self, event: ev.LandingGranted, now: float) -> None:
        sequence = self._shared.admitted[event.request_id]
        sequence.is_reserving = False
        sequence.landing = event.landing
        num_blocks = len(event.landing.block_ids)
        if num_blocks != len(sequence.block_table):
            wrong = PeerError(f"a landing of {num_blocks} blocks for {len(sequence.block_table)}")
            self._shared.fail(sequence, wrong, now)
            return
        sequence.num_sent = event.landing.num_cached_blocks * self._shared.limits.block_size
        if sequence.phase is Phase.RUNNING:
            self._send_behind(sequence, event.landing, now)
        else:
            self._proceed(sequence, now)

    def _send_behind(self, sequence: Sequence, landing: ev.Landing, now: float) -> None:
        """Sends what was computed before the landing was granted: with the step in flight, or now if there is no
        further step."""
        if sequence.num_left == 0:
            indexes = range(landing.num_cached_blocks, len(sequence.block_table))
            if _send_blocks(self._shared, sequence, indexes):
                sequence.num_sent = sequence.num_tokens
            self._on_computed(sequence, now)
        elif sequence.num_planned > max(sequence.num_computed, sequence.num_sent):
            sequence.num_sends += 1
            self._shared.out.append(SendStep(landing=landing, send_from=sequence.num_sent))
            sequence.num_sent = sequence.num_planned

    def landing_refused(self, event: ev.LandingRefused, now: float) -> None:
        sequence = self._shared.admitted[event.request_id]
        sequence.is_reserving = False
        if isinstance(event.error, Cancelled) and sequence.phase not in ENDED:
            self._shared.cancel(sequence, now)  # the gateway's cancellation reached the decode worker first
        else:
            self._shared.fail(sequence, as_retryable(event.error), now)

    def landing_lost(self, event: ev.LandingLost, now: float) -> None:
        """Fails the sequence of a lost lease, under which nothing can be committed any more."""
        sequence = self._shared.admitted.get(event.request_id)
        if sequence is None or sequence.lease_id != event.lease_id or sequence.phase in ENDED:
            return  # the sequence ended while the renewal was in flight
        if sequence.phase is not Phase.COMMITTING:  # while COMMITTING the commit's own answer decides
            self._shared.fail(sequence, as_retryable(event.error), now)

    def prefix_progress(self, event: ev.PrefixProgress, now: float) -> None:
        """Records which layers have arrived; `early_steps` decides whether the step can begin."""
        sequence = self._shared.admitted[event.request_id]
        sequence.num_loading = event.num_blocks * self._shared.limits.block_size
        sequence.load_progress = LoadProgress(progress=event, at=now)

    def prefix_loaded(self, event: ev.PrefixLoaded, now: float) -> None:
        """Publishes the blocks that were loaded and counts them as computed."""
        sequence = self._shared.admitted[event.request_id]
        block_size = self._shared.limits.block_size
        first = sequence.num_computed // block_size
        parts = prefix_parts(sequence, block_size)
        stores = [part.store.instance_id for part in parts for _ in part.keys]
        for index, checksum in enumerate(event.checksums, start=first):
            if stores[index - first] == self._shared.home_store:
                self._shared.write_behind.mark_stored(sequence.request.block_keys[index])
            self._shared.publish(sequence, index, checksum)
        sequence.num_computed += len(event.checksums) * block_size
        sequence.num_cached = sequence.num_computed
        self._shared.counters["store_hit_blocks"] += len(event.checksums)
        early = sequence.early
        if early and sequence.phase is Phase.RUNNING and sequence.num_computed >= early.start:
            indexes = range(early.num_sent // block_size, early.start // block_size)
            _send_blocks(self._shared, sequence, indexes)
        self._load_ended(sequence, event.reads, now)

    def prefix_load_failed(self, event: ev.PrefixLoadFailed, now: float) -> None:
        self._shared.counters["prefix_load_failures"] += 1
        self._load_ended(self._shared.admitted[event.request_id], event.reads, now)

    def _load_ended(self, sequence: Sequence, reads: tuple[ev.PartRead, ...], now: float) -> None:
        assert sequence.load_choice is not None, "what is loaded was chosen"
        host = sequence.placement.prefill.host
        self._shared.loads.record_reads(reads, sequence.load_choice, host, now)
        sequence.is_loading, sequence.num_loading, sequence.load_progress = False, 0, None
        is_with_early_steps = sequence.phase is Phase.RUNNING or (
            sequence.phase is Phase.LOADING and sequence.was_early
        )
        if sequence.phase is not Phase.RESERVING and not is_with_early_steps:
            self._proceed(sequence, now)


def _reservation(sequence: Sequence, now: float) -> ReserveLanding:
    return ReserveLanding(
        request_id=sequence.request_id,
        lease_id=sequence.lease_id,
        decode=sequence.placement.decode,
        num_tokens=sequence.num_tokens,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        max_tokens=sequence.request.sampling.max_tokens,
        tenant=sequence.request.tenant,
        priority=sequence.request.priority,
        block_keys=sequence.request.block_keys,
        timeout_s=max(0.0, sequence.deadline_at - now),
    )


def prefix_parts(sequence: Sequence, block_size: int) -> tuple[PrefixPart, ...]:
    """Returns the parts of the prefix that the placement's sources hold, contiguous from `num_computed` on."""
    keys, table = sequence.request.block_keys, sequence.block_table
    return tuple(
        PrefixPart(store=store, keys=keys[start:end], blocks=tuple(table[start:end]))
        for store, start, end in sequence.source_runs(sequence.num_computed // block_size, block_size)
    )


def make_ready(shared: SharedState, sequence: Sequence, now: float) -> None:
    """Makes a sequence READY and sends the KV that it already has."""
    sequence.enter(Phase.READY, now)
    sequence.ready_at = now
    send_computed(shared, sequence)


def send_computed(shared: SharedState, sequence: Sequence) -> None:
    """Sends the unsent whole blocks that are computed before the sequence runs."""
    block_size = shared.limits.block_size
    indexes = range(sequence.num_sent // block_size, sequence.num_computed // block_size)
    if _send_blocks(shared, sequence, indexes):
        sequence.num_sent = sequence.num_computed


def _send_blocks(shared: SharedState, sequence: Sequence, indexes: range) -> bool:
    """Sends whole blocks to the landing. Returns False if there are none, or no landing."""
    landing = sequence.landing
    if landing is None or not indexes:
        return False
    sequence.num_sends += 1
    pairs = tuple((sequence.block_table[i], landing.block_ids[i]) for i in indexes)
    shared.out.append(SendBlocks(request_id=sequence.request_id, landing=landing, pairs=pairs))
    return True
