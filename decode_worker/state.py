"""All decisions of a decode worker: events in, actions out; no I/O, no clock.

Owns the block pool's references: `LeaseTable` holds those of prompts in transfer, `Scheduler` those of sequences. A
request is in at most one of the two, or remembered as cancelled for a while in case it arrives late.

Its rule: blocks go from the pool to a lease, from a sealed lease to a sequence, and back to the pool. They do not move
while a peer may write them or a step uses them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.admission_and_preemption import Admission
from moonserve.decode_worker.decisions.events import LeaseCall, Refuse, RunStep
from moonserve.decode_worker.decisions.leases import LeaseTable
from moonserve.decode_worker.decisions.limits_and_counters import Counters, Limits
from moonserve.decode_worker.decisions.offloading import OffloadCosts, Offloading
from moonserve.decode_worker.decisions.scheduler import Scheduler
from moonserve.decode_worker.decisions.sequence import HandoffTimes
from moonserve.engine.admission_policy import AdmissionPolicy, BlockHolder
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.errors import Cancelled, MoonserveError, NoWorker
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.worker.alarms_and_tombstones import Alarms, Tombstones
from moonserve.worker.events import Action, Event


class DecodeState:
    """The pure state of a decode worker. The caller passes each event to `handle`, and a Tick at `wake_at`."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        policy: AdmissionPolicy | None = None,
        offload_costs: OffloadCosts | None = None,
    ) -> None:
        """`policy` decides admission and preemption; None keeps a block free per holder and preempts the latest
        arrival. `offload_costs` is None if there is no home store; preempted sequences are then computed again."""
        self.counters = Counters()
        self.pool = pool
        self._alarms = Alarms()
        self._admission = Admission(pool, limits.block_size, policy)
        self._admission.claims = self._claims
        self._leases = LeaseTable(pool, limits, self._alarms, self.counters, self._admission)
        self._offloading = Offloading(pool, limits.block_size, self.counters, offload_costs)
        self._scheduler = Scheduler(pool, limits, self._alarms, self.counters, self._admission, self._offloading)
        self._tombstones = Tombstones()
        self._draining = False
        self._handlers = self._table()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Returns the actions that follow from `event`, in order. `now` must never go backwards."""
        out: list[Action] = []
        if not isinstance(event, events.StepDone):  # a sequence that ends in a step reports its own change
            self._admission.forget_refusals()
        self._alarms.run_due(now, out)
        self._handlers[type(event)](event, now, out)
        self._advance(now, out)
        return out

    # -- load and status

    @property
    def wake_at(self) -> float | None:
        """Time at which a Tick is due; None = never."""
        return self._alarms.next_at

    @property
    def is_idle(self) -> bool:
        """True if nothing runs, waits, lands or moves, and every window is closed."""
        return not (
            self.num_running
            or self.num_waiting
            or any(self._leases.leases)
            or self._scheduler.is_stepping
            or not self._offloading.is_idle
        )

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Number of reservations without blocks plus sequences without a slot."""
        return self._leases.num_queued + self._scheduler.num_waiting

    @property
    def queued_tokens(self) -> int:
        return 0  # prompts were computed elsewhere

    @property
    def context_tokens(self) -> int:
        return self._scheduler.context_tokens

    @property
    def num_leased_blocks(self) -> int:
        return self._leases.num_leased_blocks

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks held by sequences or moves, or shared with a lease."""
        return self.pool.num_held - self._leases.num_leased_blocks

    def counter_values(self) -> dict[str, int]:
        """Returns the counters that GetStatus shows."""
        return asdict(self.counters)

    def on_evicted(self, key: BlockKey) -> None:
        """Called when the pool has evicted a findable block. A decode worker does nothing."""

    # -- events

    def _table(self) -> Mapping[type, Callable[[Any, float, list[Action]], None]]:
        landings = self._leases
        return {
            events.ReserveRequested: self._reserve,
            events.ReserveWithdrawn: lambda event, now, out: landings.withdraw(event.lease_id),
            events.WindowClosed: lambda event, now, out: landings.on_window_closed(event.lease_id, now),
            events.LeaseRenewed: landings.renew,
            events.LeaseReleased: lambda event, now, out: landings.release(event.lease_id, now, out),
            events.CommitRequested: self._commit,
            events.Verified: landings.on_verified,
            events.StepDone: lambda event, now, out: self._scheduler.on_step_done(event.sampled, now, out),
            events.StepFailed: lambda event, now, out: self._scheduler.on_step_failed(event.error, out),
            events.StoreFound: lambda event, now, out: self._offloading.on_store_found(event),
            events.BlocksStored: lambda event, now, out: self._offloading.on_stored(event, now),
            events.BlocksLoaded: lambda event, now, out: self._offloading.on_loaded(event, now),
            events.RequestCancelled: self._cancel,
            events.GatewayLost: self._lose_gateway,
            events.Draining: self._drain,
            events.Stopped: self._stop,
            events.MemoryChanged: lambda event, now, out: None,
            events.Tick: lambda event, now, out: None,
        }

    def _reserve(self, event: events.ReserveRequested, now: float, out: list[Action]) -> None:
        error: MoonserveError
        if self._tombstones.pop(event.request_id, now):
            error = Cancelled("the request was cancelled", request=event.request_id)
        elif self._draining:
            error = NoWorker("this decode worker is draining", request=event.request_id)
        else:
            self._leases.reserve(event, out)
            return
        out.append(Refuse(call=LeaseCall.RESERVE, lease_id=event.lease_id, error=error))

    def _commit(self, event: events.CommitRequested, now: float, out: list[Action]) -> None:
        self._tombstones.remember_request(event.request.request_id, now)
        self._leases.commit(event, now, out)

    def _cancel(self, event: events.RequestCancelled, now: float, out: list[Action]) -> None:
        landing = self._leases.cancel(event.request_id, now, out)
        running = self._scheduler.cancel(event.request_id)
        if not landing and not running:
            self._tombstones.add(event.request_id, now)

    def _lose_gateway(self, event: events.GatewayLost, now: float, out: list[Action]) -> None:
        self._leases.drop_gateway(event.gateway_id, now, out)
        self._scheduler.drop_gateway(event.gateway_id)

    def _drain(self, event: events.Draining, now: float, out: list[Action]) -> None:
        self._draining = event.is_on
        if event.is_on:
            self._leases.refuse_queued(NoWorker("this decode worker is draining"), out)

    def _stop(self, event: events.Stopped, now: float, out: list[Action]) -> None:
        self._draining = True
        stopping = NoWorker("the decode worker is stopping")
        self._leases.stop(stopping, now, out)
        self._scheduler.fail_all(stopping, out)

    # -- after every event

    def _advance(self, now: float, out: list[Action]) -> None:
        """Turns landed prompts into sequences, starts the next steps and grants reservations from the rest."""
        for lease in self._leases.landed:
            assert lease.commit is not None, "landed without a commit"
            request = lease.commit.request
            sequence = self._scheduler.add(request, lease.blocks, lease.committed_at + request.timeout_s)
            sequence.handoff_times = HandoffTimes(committed_at=lease.committed_at, transfer_s=lease.commit.transfer_s)
        self._leases.landed.clear()
        num_steps = 0
        while slices := self._scheduler.next_step(now, out):
            # Steps go before all other actions, so that tokens are sent while the engine computes.
            out.insert(num_steps, RunStep(slices=slices))
            num_steps += 1
        if self._leases.num_queued and not self._scheduler.has_preempted and self._may_grant_reservations:
            self._leases.grant_queued(now, out)

    @property
    def _may_grant_reservations(self) -> bool:
        """True if reservations may be granted. Subclasses override it where other requests wait for blocks."""
        return True

    def _claims(self) -> Iterator[BlockHolder]:
        """Yields every request that has blocks or will have them."""
        yield from self._leases.claims()
        yield from self._scheduler.claims()

    # -- proof

    def _other_references(self) -> Counter[int]:
        """Returns the references to blocks that neither leases nor sequences hold."""
        references: Counter[int] = Counter()
        for blocks in self._offloading.held_blocks():
            references.update(blocks)
        return references

    def validate(self) -> None:
        """Raises AssertionError unless free + held + leased ≤ all blocks and each block's references equal its holders.
        The sum is smaller only where elastic memory is out of reach."""
        self.pool.validate()
        self._leases.validate()
        self._scheduler.validate()
        self._admission.validate()
        self._offloading.validate()
        references = self._other_references()
        for lease in self._leases.leases:
            references.update(lease.blocks)
        for sequence in self._scheduler.holders():
            references.update(sequence.block_table)
        for block in range(self.pool.num_blocks):
            assert self.pool.references_of(block) == references[block], f"block {block} leaks"
        total = self.pool.num_free + self.num_held_blocks + self.num_leased_blocks
        assert total <= self.pool.num_blocks, "there are more blocks than there are"
