"""The automaton of a prefill worker: `handle(event, now) -> actions`.

    QUEUED → RESERVING → LOADING → READY → RUNNING → SENDING → COMMITTING → CLOSING → CLOSED
                            |        ↑_____________________________|  blocks arrived corrupt: compute again
                     |      |←---------------→ RUNNING before the prefix has loaded, and back if it is corrupt
                     |→ RUNNING in an engine that would idle

Reserving and loading overlap each other and the steps of earlier sequences. One step is in flight per pipeline stage.
Rules: blocks are released only when no operation in flight uses them; every sequence ends in a handoff, a last token or
a failure that is reported to its gateway, if that is still there. No clock, no I/O, no tensors; `now` is in monotonic
seconds.

This file owns arrival, cancellation and deadlines. `preparation`, `steps` (with `early_steps`) and `handoffs` own the
phases, `write_behind` owns the puts to the store, `load_or_compute` decides whether a stored prefix is read, and
`shared_state` holds the state that all of them share.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.handoffs import Handoffs, out_of_time
from moonserve.prefill_worker.decisions.load_or_compute import PrefixLoads
from moonserve.prefill_worker.decisions.preparation import Preparation
from moonserve.prefill_worker.decisions.sequence import ENDED, PREPARED, Phase, Sequence
from moonserve.prefill_worker.decisions.shared_state import Limits, SharedState
from moonserve.prefill_worker.decisions.steps import Steps
from moonserve.protocol.errors import Cancelled, InvalidRequest, MoonserveError
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import Endpoint, LeaseId, RequestId
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.alarms_and_tombstones import Alarms
from moonserve.worker.events import Action, Event


class PrefillState:
    """The pure state of a prefill worker. `lease_prefix` makes its landing leases unique in the cluster."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        lease_prefix: str,
        profile: PrefillProfile,
        home_store: str | None,
    ) -> None:
        """The caller must report the keys that `pool` evicts to `on_evicted`."""
        self.pool = pool
        self._shared = SharedState(pool, limits, profile=profile, home_store=home_store)
        self._handoffs = Handoffs(self._shared)
        self._steps = Steps(self._shared, self._handoffs.start)
        self._preparation = Preparation(self._shared, self._steps.finish_held)
        self._lease_prefix = lease_prefix
        self._alarms = Alarms()
        self._num_submitted = 0
        self._handlers = self._handler_table()

    def _handler_table(self) -> Mapping[type, Callable[[Any, float], None]]:
        puts = self._shared.write_behind
        return {
            ev.Submitted: self._submitted,
            ev.RequestCancelled: self._cancel_requested,
            ev.GatewayLost: self._gateway_lost,
            ev.MemoryChanged: lambda _event, _now: None,
            ev.Tick: lambda _event, now: self._alarms.run_due(now),
            ev.LandingGranted: self._preparation.landing_granted,
            ev.LandingRefused: self._preparation.landing_refused,
            ev.LandingLost: self._preparation.landing_lost,
            ev.PrefixProgress: self._preparation.prefix_progress,
            ev.PrefixLoaded: self._preparation.prefix_loaded,
            ev.PrefixLoadFailed: self._preparation.prefix_load_failed,
            ev.StepDone: self._steps.on_step_done,
            ev.StepGivenUp: self._steps.on_step_given_up,
            ev.StepFailed: self._steps.on_step_failed,
            ev.WritesDone: self._handoffs.on_writes_done,
            ev.WritesFailed: self._handoffs.on_writes_failed,
            ev.HandoffAccepted: self._handoffs.on_accepted,
            ev.HandoffCorrupt: self._handoffs.on_corrupt,
            ev.HandoffFailed: self._handoffs.on_failed,
            ev.StoreFound: lambda event, _now: puts.on_store_found(event.store),
            ev.PutDone: lambda event, _now: puts.on_put_done(event),
            ev.PutFailed: lambda event, _now: puts.on_put_failed(event),
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handles an event and returns the actions that follow, in order.

        Raises IllegalTransition, KeyError or ValueError for an answer to an operation that is not in flight.
        """
        shared = self._shared
        shared.out = []
        self._handlers[type(event)](event, now)
        self._steps.settle(now)
        shared.pool.reclaim()  # held blocks need no preemption: prefill ends soon by itself
        while shared.resubmitted:
            self._submitted(shared.resubmitted.pop(), now)
        self._preparation.admit(now)
        shared.out += shared.prefetches.start()
        self._steps.run(now)
        put = shared.write_behind.start()
        if put is not None:
            shared.out.append(put)
        return shared.out

    # -- load and status

    @property
    def counters(self) -> Counter[str]:
        return self._shared.counters

    @property
    def prefix_loads(self) -> PrefixLoads:
        """Load choices and store speeds, for metrics."""
        return self._shared.loads

    @property
    def is_idle(self) -> bool:
        return not self._shared.sequences

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are queued, being prepared or ready for a step."""
        return len(self._shared.queue) + sum(sequence.phase in PREPARED for sequence in self._shared.admitted.values())

    @property
    def num_running(self) -> int:
        return len(self._shared.sequences) - self.num_waiting

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_held

    def counter_values(self) -> dict[str, int]:
        """Returns the nonzero counters, which GetStatus shows."""
        return {name: count for name, count in self.counters.items() if count}

    def on_evicted(self, key: BlockKey) -> None:
        """Called when the pool has evicted a findable block."""
        self._shared.write_behind.on_evicted(key)

    @property
    def queued_tokens(self) -> int:
        """Number of tokens to compute before a request that arrives now can start."""
        shared = self._shared
        left = sum(s.num_left for s in shared.admitted.values() if s.phase not in ENDED)
        for sequence in shared.queue:
            sources = sequence.placement.prefix_sources
            loadable = sum(source.num_blocks for source in sources) * shared.limits.block_size
            left += max(1, sequence.num_tokens - loadable)
        return left

    @property
    def needs_home_store(self) -> bool:
        """True if blocks cannot be put before the next StoreFound event."""
        return self._shared.home_store is not None and self._shared.write_behind.needs_home

    def leases_to_renew(self) -> list[tuple[RequestId, Endpoint, LeaseId]]:
        """Returns the landing leases to renew: those that are granted and not handed off."""
        return [
            (sequence.request_id, sequence.placement.decode, sequence.lease_id)
            for sequence in self._shared.admitted.values()
            if sequence.landing is not None and not sequence.handed_off
        ]

    @property
    def wake_at(self) -> float | None:
        """Time at which a Tick is due; None = never."""
        return self._alarms.next_at

    # -- arrival

    def _submitted(self, event: ev.Submitted, now: float) -> None:
        shared, request_id = self._shared, event.request.request_id
        earlier = shared.sequences.get(request_id)
        if earlier is None:
            sequence = self._enqueue(event, now)
            error = self._refusal(sequence, now)
            if error is not None:
                shared.fail(sequence, error, now)
        elif earlier.phase is Phase.CLOSING:
            shared.successors[request_id] = event  # in any other phase it is a duplicate and ignored

    def _enqueue(self, event: ev.Submitted, now: float) -> Sequence:
        shared, request = self._shared, event.request
        self._num_submitted += 1
        priority = request.priority if shared.limits.policy == "priority" else 0
        placement = event.placement
        if shared.limits.num_stages > 1:  # a stored block has all layers, but each stage has only its own
            placement = replace(placement, prefix_sources=())
        sequence = Sequence(
            request=request,
            placement=placement,
            rank=(priority, now + placement.rank, self._num_submitted),
            lease_id=LeaseId(f"{self._lease_prefix}-{self._num_submitted}"),
            submitted_at=now,
        )
        shared.enqueue(sequence)
        self._alarms.schedule(sequence.deadline_at, self._time_out, request.request_id)
        shared.counters["submitted_requests"] += 1
        return sequence

    def _refusal(self, sequence: Sequence, now: float) -> MoonserveError | None:
        """Returns the error if a request can never run here, else None."""
        limits, ids = self._shared.limits, {"request": sequence.request_id}
        if self._shared.tombstones.pop(sequence.request_id, now):
            self.counters["cancelled_unseen"] += 1
            return Cancelled("cancelled before it arrived", **ids)
        if sequence.num_tokens > limits.max_model_len:
            return InvalidRequest(
                f"the prompt has {sequence.num_tokens} tokens and the worker takes at most {limits.max_model_len}",
                **ids,
            )
        return self._shared.error_if_too_long(sequence)

    # -- cancellation and deadlines

    def _cancel_requested(self, event: ev.RequestCancelled, now: float) -> None:
        shared = self._shared
        sequence = shared.sequences.get(event.request_id)
        if sequence is not None and shared.successors.pop(event.request_id, None) is not None:
            shared.report_failure(sequence, Cancelled("cancelled", request=event.request_id))
        if sequence is None:
            shared.tombstones.add(event.request_id, now)
        elif sequence.phase not in ENDED:
            shared.report_failure(sequence, Cancelled("cancelled", request=event.request_id))
            shared.cancel(sequence, now)

    def _gateway_lost(self, event: ev.GatewayLost, now: float) -> None:
        shared = self._shared
        shared.successors = {
            request_id: successor
            for request_id, successor in shared.successors.items()
            if successor.request.gateway_id != event.gateway_id
        }
        for sequence in list(shared.sequences.values()):
            if sequence.request.gateway_id == event.gateway_id and sequence.phase not in ENDED:
                shared.cancel(sequence, now)

    def _time_out(self, request_id: RequestId, now: float) -> None:
        """Fails the request's sequence if its deadline has passed."""
        sequence = self._shared.sequences.get(request_id)
        if sequence is None or sequence.deadline_at > now:
            return
        # A commit in flight has its own timeout, and after it the decode worker enforces the deadline.
        if sequence.phase not in ENDED and sequence.phase is not Phase.COMMITTING:
            self._shared.fail(sequence, out_of_time(sequence), now)

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError unless every block's references equal its owners and every sequence is in one place."""
        shared = self._shared
        shared.pool.validate()
        shared.write_behind.validate()
        self._steps.validate()
        references = Counter(shared.write_behind.held_blocks())
        for sequence in shared.sequences.values():
            references.update(sequence.block_table)
            sequence.validate(shared.limits.block_size)
        for block in range(shared.pool.num_blocks):
            held, owned = shared.pool.references_of(block), references[block]
            assert held == owned, f"block {block} has {held} references and {owned} owners"
        in_queue = {sequence.request_id for sequence in shared.queue}
        shared.prefetches.validate(in_queue)
        assert in_queue | set(shared.admitted) == set(shared.sequences), "a sequence is lost"
        assert not in_queue & set(shared.admitted), "a sequence waits and runs"
        assert set(shared.successors) <= set(shared.sequences), "a successor waits for nobody"
        assert not shared.resubmitted, "a request that came back was forgotten"
