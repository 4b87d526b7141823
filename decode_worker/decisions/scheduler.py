"""Scheduling of sequences: which sequences run, and which are preempted when the pool is full.

Requirements, and how each is met:
1. *A running sequence never stops for lack of a batch slot.* It keeps its slot until it ends or is preempted.
2. *Blocks are allocated on demand.* When none is left, the `Admission` chooses a holder, which gives all its blocks
   back (preemption). Later its KV is read from where `Offloading` put it, or recomputed in chunks next to the decoding
   sequences.
3. *Something always progresses.* The best-ranked holder is never preempted. A preempted sequence is restored before any
   later one, and before new reservations are granted. A sequence that does not fit into an empty pool fails.
4. *Nothing that a step reads changes during it.* A sequence that ends while steps use it frees its blocks after them,
   and no sequence is preempted while a step is in flight (`steps`).

Does not know leases: held blocks that no sequence has are landing blocks, which are released in bounded time.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from moonserve.decode_worker.decisions.admission_and_preemption import Admission
from moonserve.decode_worker.decisions.events import DecodePhase, SendTokens
from moonserve.decode_worker.decisions.limits_and_counters import Counters, Limits
from moonserve.decode_worker.decisions.offloading import Offloading
from moonserve.decode_worker.decisions.sequence import Sequence, SequencePhase, rank_of
from moonserve.decode_worker.decisions.steps import StepComposer, StepsInFlight
from moonserve.engine.admission_policy import BlockHolder
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.errors import DeadlineExceeded, InvalidRequest, MoonserveError
from moonserve.protocol.request import BlockId, DecodeReport, FinishReason, GatewayId, Request, RequestId
from moonserve.worker.alarms_and_tombstones import Alarms
from moonserve.worker.events import Action, Fail

# Elastic memory moves between processes within milliseconds, on a busy machine within a few hundred.
MEMORY_WAIT_S = 1.0


def _add_reports(sequence: Sequence, reason: FinishReason | None, sending: SendTokens, *, began_at: float) -> None:
    """Adds the reports that a step completes to `sending`: the first step's, and the traced phase at the last token,
    which has a `reason`. `began_at`: when the step began."""
    landed, request = sequence.handoff_times, sequence.request
    if landed is None:  # the prompt was computed here: there was no handoff
        return
    if landed.began_at is None:
        landed.began_at = began_at
        sending.began.append(
            DecodeReport(
                request_id=request.request_id,
                transfer_s=landed.transfer_s,
                queue_s=began_at - landed.committed_at,
            )
        )
    if request.traceparent and reason is not None:
        sending.ended.append(
            DecodePhase(
                traceparent=request.traceparent,
                queued_at=landed.committed_at,
                began_at=landed.began_at,
                num_tokens=len(sequence.token_ids) - len(request.token_ids),
                times_preempted=sequence.times_preempted,
                num_draft_tokens=sequence.num_drafted,
                num_accepted_tokens=sequence.num_accepted,
            )
        )


class Scheduler:
    """The live sequences of one worker. Methods append actions to `out`."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        alarms: Alarms,
        counters: Counters,
        admission: Admission,
        offloading: Offloading,
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._offloading = offloading
        self._limits = limits
        self._alarms = alarms
        self._counters = counters
        self._sequences: dict[RequestId, Sequence] = {}  # live ones
        self._running: list[Sequence] = []  # in order of admission
        self._waiting: list[Sequence] = []  # by rank
        self._steps = StepsInFlight()
        self._waits_since: float | None = None  # since when it waits for memory of other processes
        self._num_added = 0
        self._composition = StepComposer(limits, counters)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens held by running sequences."""
        return sum(len(sequence.token_ids) for sequence in self._running)

    @property
    def is_stepping(self) -> bool:
        return len(self._steps) > 0

    @property
    def has_preempted(self) -> bool:
        """True if a sequence waits for blocks; it comes before new reservations."""
        return any(not sequence.block_table for sequence in self._waiting)

    # -- membership

    def add(
        self,
        request: Request,
        blocks: Seq[BlockId],
        deadline_at: float,
        num_computed: int | None = None,
    ) -> Sequence:
        """Adds a sequence whose prompt has landed. If `num_computed` is given, only that many tokens have KV, and the
        rest is computed in chunks. Replaces an earlier attempt at the same request."""
        earlier = self._sequences.get(request.request_id)
        if earlier is not None:
            self._drop(earlier)
        self._num_added += 1
        sequence = Sequence(
            request=request,
            order=self._num_added,
            deadline_at=deadline_at,
            token_ids=list(request.token_ids),
            block_table=list(blocks),
        )
        if num_computed is not None:
            sequence.rewind(num_computed)
        self._sequences[request.request_id] = sequence
        self._alarms.schedule(deadline_at, self._time_out, request.request_id)
        insort(self._waiting, sequence, key=rank_of)
        return sequence

    def cancel(self, request_id: RequestId) -> bool:
        """Ends the sequence of a request. Returns False if there is none."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._drop(sequence)
        return sequence is not None

    def drop_gateway(self, gateway_id: GatewayId) -> None:
        """Ends the sequences whose tokens would go to a lost gateway."""
        for sequence in list(self._sequences.values()):
            if sequence.request.gateway_id == gateway_id:
                self._drop(sequence)

    def _time_out(self, request_id: RequestId, now: float, out: list[Action]) -> None:
        """Fails the request's sequence if its deadline has passed."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.deadline_at <= now:
            timeout_s = sequence.request.timeout_s
            self._fail(sequence, DeadlineExceeded(f"not finished within {timeout_s:g} s"), out)

    def fail_all(self, error: MoonserveError, out: list[Action]) -> None:
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error, out)

    # -- the step

    def next_step(self, now: float, out: list[Action]) -> list[Slice]:
        """Returns the slices to compute now, or after the step in flight. Empty if no step can begin."""
        if self._steps:
            return self._next_ahead(now, out)
        self._preempt_reclaimed(now, out)
        while True:
            gave_way = self._extend_block_tables(now, out)  # running sequences get blocks first
            if self._waiting:
                self._admit_waiting(now, out)
                gave_way |= self._extend_block_tables(now, out)
            batch = self._composition.compose(self._running)
            if batch or not gave_way:
                return self._steps.begin(self._composition.slices_of(batch), now)

    def _next_ahead(self, now: float, out: list[Action]) -> list[Slice]:
        if not self._limits.runs_ahead or len(self._steps) > 1:
            return []
        if self._waiting:
            self._admit_waiting(now, out)
        return self._steps.begin(self._steps.plan_ahead(self._running, self._limits, self._pool), now)

    def is_in_step(self, sequence: Sequence) -> bool:
        """Returns True if a step in flight computes tokens of the sequence."""
        return self._steps.uses(sequence)

    def on_step_done(self, sampled: Seq[Sampled | None], now: float, out: list[Action]) -> None:
        """Handles the end of the oldest step in flight: appends its tokens and ends the finished sequences."""
        step = self._steps.end()
        self._composition.observe(step, now)
        sent: dict[GatewayId, SendTokens] = {}
        for sequence, piece, result in zip(step.batch, step.slices, sampled, strict=True):
            if sequence.phase is SequencePhase.ENDED:
                self._free_unless_used(sequence)
            elif result is None:
                sequence.rewind(sequence.slice.end)  # a chunk that does not reach the sequence's end
            elif result.failure is not None:
                self._fail(sequence, InvalidRequest(result.failure), out)
            else:
                tokens = sequence.accept(result, piece, self._limits.max_model_len)
                self._counters.count_draft(piece.num_draft, len(tokens) - 1)
                gateway_id = sequence.request.gateway_id
                if (sending := sent.get(gateway_id)) is None:
                    sending = sent[gateway_id] = SendTokens(gateway_id=gateway_id, tokens=[])
                sending.tokens.extend(tokens)
                reason = tokens[-1].finish_reason
                _add_reports(sequence, reason, sending, began_at=step.began_at)
                if reason is not None:
                    self._counters.requests_finished += 1
                    stopped = reason is FinishReason.LENGTH
                    self._admission.on_ended(sequence, stopped=stopped)
                    self._offloading.offload_answer(sequence, out)
                    self._end(sequence)
        self._counters.steps += 1
        self._admission.on_step()
        for sending in sent.values():
            self._counters.generated_tokens += len(sending.tokens)
            out.append(sending)

    def on_step_failed(self, error: MoonserveError, out: list[Action]) -> None:
        """Handles the failure of the oldest step in flight: all its sequences fail."""
        for sequence in self._steps.end().batch:
            if sequence.phase is SequencePhase.ENDED:
                self._free_unless_used(sequence)
            else:
                self._fail(sequence, error, out)

    def _admit_waiting(self, now: float, out: list[Action]) -> None:
        may_restore = True
        for sequence in list(self._waiting):
            if len(self._running) >= self._limits.max_num_seqs:
                return
            if not sequence.block_table:
                # A later sequence must not take the blocks that this one waits for.
                may_restore = may_restore and self._restore(sequence, now, out)
                if not may_restore:
                    continue
            if sequence.move_id is not None:  # its KV is being read from the store
                continue
            if sequence.phase is SequencePhase.ENDED:  # failed in `_restore`: it no longer fits into the pool
                continue
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.phase = SequencePhase.RUNNING

    def _restore(self, sequence: Sequence, now: float, out: list[Action]) -> bool:
        """Gives a preempted sequence blocks again and starts the read of the KV that the store has. Returns False if
        the sequence has to wait."""
        if sequence.move_id is not None:  # its KV is still being put into the store
            return False
        num_tokens = len(sequence.token_ids)
        if self._limits.blocks_for(num_tokens) > self._pool.capacity:  # the capacity of elastic memory can shrink
            self._fail(sequence, self._too_long(sequence), out)
            return True
        usable = (num_tokens - 1) // self._limits.block_size  # the last token is always computed
        keys = [] if sequence.is_scored else sequence.block_keys[:usable]
        blocks = self._admission.admit(sequence, keys, self._limits.blocks_for(num_tokens))
        if blocks is None:
            return False
        shared, fresh = blocks
        sequence.block_table += shared
        sequence.block_table += fresh
        sequence.rewind(len(shared) * self._limits.block_size)
        if not sequence.is_scored:
            self._offloading.fetch(sequence, len(shared), now, out)
        return True

    def _extend_block_tables(self, now: float, out: list[Action]) -> bool:
        """Gives running sequences the blocks for their next token, by rank. Returns True if one stopped running."""
        needy = [sequence for sequence in self._running if not sequence.has_room(self._limits.block_size)]
        if not needy:
            return False
        before = len(self._running)
        for sequence in sorted(needy, key=rank_of):
            if sequence.phase is SequencePhase.RUNNING:  # not preempted in an earlier iteration
                self._add_block(sequence, now, out)
        return len(self._running) < before

    def _preempt_reclaimed(self, now: float, out: list[Action]) -> None:
        """Preempts the sequences with blocks for which there is no memory any more."""
        blocks = self._pool.reclaim()
        for sequence in list(self._sequences.values()) if blocks else ():
            if sequence.move_id is None and not blocks.isdisjoint(sequence.block_table):
                self._preempt(sequence, now, out)

    def _add_block(self, sequence: Sequence, now: float, out: list[Action]) -> None:
        """Gives a sequence one more block, preempting others if needed. If there is none, the sequence is preempted,
        fails, or is left as it is until a lease or a move ends or memory arrives."""
        if len(sequence.block_table) >= self._pool.capacity:
            self._fail(sequence, self._too_long(sequence), out)
            return
        while (block := self._pool.allocate(1)) is None:
            if self._pool.num_free and self._may_wait_for_memory(now):
                return
            claims = [claim for claim in self.claims() if self._sequences[claim.request.request_id].move_id is None]
            if (
                len(claims) == 1 or self._offloading.num_blocks_in_puts
            ):  # no one else to preempt, or puts free blocks soon
                return
            victim = self._sequences[self._admission.choose_victim(sequence, claims)]
            self._preempt(victim, now, out)
            if victim is sequence:
                return
        self._waits_since = None
        sequence.block_table += block

    def _may_wait_for_memory(self, now: float) -> bool:
        """Returns True while it is worth waiting for memory that other processes report as free. Their reports are some
        tenths of a second old, and two processes may count on the same pages, so the wait is bounded."""
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < MEMORY_WAIT_S

    def _preempt(self, sequence: Sequence, now: float, out: list[Action]) -> None:
        """Takes a sequence's blocks. It waits, and its rank puts it before all sequences that arrived later."""
        self._counters.num_preemptions += 1
        sequence.times_preempted += 1
        self._offloading.offload(sequence, now, out)
        self._free(sequence)
        self._admission.on_preempted(sequence)
        if sequence.phase is SequencePhase.RUNNING:
            self._running.remove(sequence)
            sequence.phase = SequencePhase.WAITING
            insort(self._waiting, sequence, key=rank_of)

    # -- ends

    def _fail(self, sequence: Sequence, error: MoonserveError, out: list[Action]) -> None:
        request = sequence.request
        self._counters.requests_failed += 1
        self._end(sequence)
        out.append(Fail(gateway_id=request.gateway_id, request_id=request.request_id, error=error))

    def _drop(self, sequence: Sequence) -> None:
        self._counters.requests_dropped += 1
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Removes a sequence. Its blocks become free now, or after the steps that use them."""
        among = self._running if sequence.phase is SequencePhase.RUNNING else self._waiting
        among.remove(sequence)
        del self._sequences[sequence.request.request_id]
        sequence.phase = SequencePhase.ENDED
        self._free_unless_used(sequence)

    def _free_unless_used(self, sequence: Sequence) -> None:
        if not self._steps.uses(sequence):
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table.clear()
        self._admission.forget_refusals()

    def _too_long(self, sequence: Sequence) -> InvalidRequest:
        return InvalidRequest(
            f"a sequence of {len(sequence.token_ids)} tokens does not fit into this worker's "
            f"{self._pool.capacity} blocks of {self._limits.block_size} tokens",
            request=sequence.request.request_id,
        )

    def claims(self) -> Iterator[BlockHolder]:
        """Yields the live sequences that have blocks, as holders."""
        for sequence in self._sequences.values():
            if sequence.block_table:
                yield BlockHolder(sequence, sequence.block_table, sequence.times_preempted)

    # -- proof

    def holders(self) -> list[Sequence]:
        """Returns all sequences that may hold blocks, including ended ones that a step in flight uses."""
        return [*self._sequences.values(), *self._steps.ended()]

    def validate(self) -> None:
        """Raises AssertionError unless every sequence is either running or waiting, and the lists are in order."""
        live = set(self._sequences.values())
        assert live == {*self._running, *self._waiting}, "a sequence is lost"
        assert len(live) == len(self._running) + len(self._waiting), "a sequence is in two places"
        assert len(self._running) <= self._limits.max_num_seqs, "too many run"
        assert self._waiting == sorted(self._waiting, key=rank_of), "the waiting are out of order"
        for sequence in self._running:
            assert sequence.block_table, f"{sequence.request.request_id} runs without blocks"
            assert sequence.slice.block_table is sequence.block_table, "a slice lost its blocks"
