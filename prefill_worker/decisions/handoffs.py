"""Handoff of sequences to their decode workers (RUNNING → SENDING → COMMITTING → CLOSING).

The commit follows the last write and carries the checksum of every landed block. Its answer is accepted, failed or
corrupt. Corrupt blocks, and all blocks computed from them, are dropped, computed again and sent again.
"""

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.events import CommitHandoff
from moonserve.prefill_worker.decisions.sequence import Phase, Sequence
from moonserve.prefill_worker.decisions.shared_state import SharedState, as_retryable
from moonserve.protocol.errors import DeadlineExceeded, IntegrityError
from moonserve.protocol.request import RequestId

# Three corrupt handoffs of one sequence mean a broken path, not bad luck.
MAX_ATTEMPTS = 3


class Handoffs:
    """Hands off the computed sequences of a shared to their decode workers."""

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def start(self, sequence: Sequence, now: float) -> None:
        """Starts the handoff of a sequence that has all its KV and a first token, and is not finished."""
        sequence.enter(Phase.SENDING, now)
        self._commit_if_sent(sequence, now)

    def on_writes_done(self, event: ev.WritesDone, now: float) -> None:
        sequence = self._shared.admitted[event.request_id]
        sequence.num_sends -= 1
        self._shared.close_if_unused(sequence, now)
        self._commit_if_sent(sequence, now)

    def on_writes_failed(self, event: ev.WritesFailed, now: float) -> None:
        sequence = self._shared.admitted[event.request_id]
        sequence.num_sends -= 1
        self._shared.counters["failed_sends"] += 1
        self._shared.fail(sequence, as_retryable(event.error), now)

    def _commit_if_sent(self, sequence: Sequence, now: float) -> None:
        landing, token = sequence.landing, sequence.first_token
        if sequence.phase is not Phase.SENDING or sequence.num_sends:
            return
        assert landing is not None, "only a sequence with a landing is handed off"
        assert token is not None, "the first token goes out before SENDING"
        sequence.enter(Phase.COMMITTING, now)
        sequence.is_committing = True
        sent = range(landing.num_cached_blocks, len(sequence.block_table))
        self._shared.out.append(
            CommitHandoff(
                request=sequence.request,
                decode=sequence.placement.decode,
                lease_id=sequence.lease_id,
                first_token_id=token.token_id,
                num_cached_blocks=landing.num_cached_blocks,
                checksums=tuple(sequence.checksums[index] for index in sent),
                timeout_s=max(0.0, sequence.deadline_at - now),
                transfer_s=now - sequence.first_token_at,
            )
        )

    def on_accepted(self, event: ev.HandoffAccepted, now: float) -> None:
        sequence = self._answered(event.request_id)
        sequence.handed_off = True
        self._shared.counters["handed_off_requests"] += 1
        if sequence.phase is Phase.COMMITTING:
            self._shared.end(sequence, now)
        else:
            self._shared.close_if_unused(sequence, now)

    def on_failed(self, event: ev.HandoffFailed, now: float) -> None:
        sequence = self._answered(event.request_id)
        self._shared.counters["failed_handoffs"] += 1
        self._shared.fail(sequence, as_retryable(event.error), now)

    def on_corrupt(self, event: ev.HandoffCorrupt, now: float) -> None:
        sequence = self._answered(event.request_id)
        self._shared.counters["integrity_failures"] += len(event.indexes)
        sequence.num_corrupt += 1
        # Everything after the first corrupt block was computed from it.
        for block in sequence.block_table[min(event.indexes) :]:
            self._shared.pool.uncache(block)
        if sequence.phase is Phase.CLOSING:
            self._shared.close_if_unused(sequence, now)
        elif now >= sequence.deadline_at:
            self._shared.fail(sequence, out_of_time(sequence), now)
        elif sequence.num_corrupt >= MAX_ATTEMPTS or not self._rewind(sequence, min(event.indexes)):
            text = f"KV arrived corrupt {sequence.num_corrupt} times"
            self._shared.fail(sequence, IntegrityError(text, request=sequence.request_id), now)
        else:
            sequence.enter(Phase.READY, now)

    def _rewind(self, sequence: Sequence, first: int) -> bool:
        """Replaces the blocks from index `first` on with fresh ones, to be computed and sent again.

        Returns False if there are no free blocks. The old blocks may be shared, so they cannot be computed in place.
        """
        shared, landing = self._shared, sequence.landing
        assert landing is not None, "only what has landed can arrive corrupt"
        old = sequence.block_table[first:]
        del sequence.block_table[first:]
        shared.pool.release(old)
        fresh = shared.pool.allocate(len(old))
        if fresh is None:
            return False
        sequence.block_table += fresh
        sequence.checksums = {i: c for i, c in sequence.checksums.items() if i < first}
        sequence.num_computed = first * shared.limits.block_size
        sequence.num_cached = min(sequence.num_cached, sequence.num_computed)
        sequence.num_sent = max(first, landing.num_cached_blocks) * shared.limits.block_size
        shared.counters["recomputed_blocks"] += len(old)
        return True

    def _answered(self, request_id: RequestId) -> Sequence:
        sequence = self._shared.admitted[request_id]
        if not sequence.is_committing:
            raise ValueError(f"no commit of {request_id} is in flight")
        sequence.is_committing = False
        return sequence


def out_of_time(sequence: Sequence) -> DeadlineExceeded:
    return DeadlineExceeded(f"no result within {sequence.request.timeout_s:g} s", request=sequence.request_id)
