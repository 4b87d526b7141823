"""`DecodeState`: everything a decode worker decides. Events in, actions out; no I/O, no clock.

Owns the block pool's references: `Landings` holds those of prompts that are on their way, `Schedule` those of
sequences. A request is in at most one of the two, or remembered as cancelled for a while in case it comes late.

Its rule: blocks go from the pool to a lease, from a sealed lease to a sequence, and back to the pool, never anywhere
while a peer may write them or a step uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from decode_worker import events
from decode_worker.actions import Question, Refuse, RunStep
from decode_worker.allotment import Allotment
from decode_worker.keeping import Keeping, KeepingCosts
from decode_worker.landings import Landings
from decode_worker.limits import Counters, Limits
from decode_worker.schedule import Schedule
from decode_worker.sequence import Landed
from engine.block_pool import BlockPool
from engine.lookahead.base import Holder, Policy
from protocol.errors import Cancelled, MoonserveError, NoWorker
from protocol.keys import BlockKey
from worker.alarms import Alarms, Tombstones
from worker.events import Action, Event


class DecodeState:
    """`handle` every event; `wake_at` says when a Tick is due."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        policy: Policy | None = None,
        keeping: KeepingCosts | None = None,
    ) -> None:
        """`policy`: who is let in and who gives way; None: a block is kept for each, and the last one gives way.
        `keeping`: of a worker that has a home store; None: whoever gave way is computed again."""
        self.counters = Counters()
        self.pool = pool
        self._alarms = Alarms()
        self._allotment = Allotment(pool, limits.block_size, policy)
        self._allotment.claims = self._claims
        self._landings = Landings(pool, limits, self._alarms, self.counters, self._allotment)
        self._keeping = Keeping(pool, limits.block_size, self.counters, keeping)
        self._schedule = Schedule(pool, limits, self._alarms, self.counters, self._allotment, self._keeping)
        self._tombstones = Tombstones()
        self._draining = False
        self._handlers = self._table()

    def handle(self, event: Event, now: float) -> list[Action]:
        """What is to be done about `event`, in order. `now` never goes backwards."""
        out: list[Action] = []
        if not isinstance(event, events.StepDone):  # whose ends tell by themselves
            self._allotment.changed()
        self._alarms.ring(now, out)
        self._handlers[type(event)](event, now, out)
        self._advance(now, out)
        return out

    # -- figures

    @property
    def wake_at(self) -> float | None:
        """When something may be due; None = never."""
        return self._alarms.next_at

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits, lands or moves, and every window is closed."""
        return not (
            self.num_running
            or self.num_waiting
            or any(self._landings.leases)
            or self._schedule.is_stepping
            or not self._keeping.is_idle
        )

    @property
    def num_running(self) -> int:
        return self._schedule.num_running

    @property
    def num_waiting(self) -> int:
        """Reservations without blocks and sequences without a slot."""
        return self._landings.num_queued + self._schedule.num_waiting

    @property
    def context_tokens(self) -> int:
        return self._schedule.context_tokens

    @property
    def num_leased_blocks(self) -> int:
        return self._landings.num_leased_blocks

    @property
    def num_held_blocks(self) -> int:
        """Held by sequences, or shared with a landing."""
        return self.pool.num_held - self._landings.num_leased_blocks

    def counted(self) -> dict[str, int]:
        """What GetStatus shows of `counters`."""
        return self.counters.as_dict()

    def evicted(self, key: BlockKey) -> None:
        """The pool cannot serve this block any more."""

    # -- events

    def _table(self) -> Mapping[type, Callable[[Any, float, list[Action]], None]]:
        landings = self._landings
        return {
            events.ReserveRequested: self._reserve,
            events.ReserveWithdrawn: lambda event, now, out: landings.withdraw(event.lease_id),
            events.WindowClosed: lambda event, now, out: landings.window_closed(event.lease_id, now),
            events.LeaseRenewed: landings.renew,
            events.LeaseReleased: lambda event, now, out: landings.release(event.lease_id, now, out),
            events.CommitRequested: self._commit,
            events.Verified: landings.verified,
            events.StepDone: lambda event, now, out: self._schedule.step_done(event.sampled, now, out),
            events.StepFailed: lambda event, now, out: self._schedule.step_failed(event.error, out),
            events.StoreFound: lambda event, now, out: self._keeping.found(event),
            events.Kept: lambda event, now, out: self._keeping.kept(event, now),
            events.BlocksLoaded: lambda event, now, out: self._keeping.loaded(event, now),
            events.RequestCancelled: self._cancel,
            events.GatewayLost: self._lose_gateway,
            events.Draining: self._drain,
            events.Stopped: self._stop,
            events.MemoryChanged: lambda event, now, out: None,
            events.Tick: lambda event, now, out: None,
        }

    def _reserve(self, event: events.ReserveRequested, now: float, out: list[Action]) -> None:
        error: MoonserveError
        if self._tombstones.take(event.request_id, now):
            error = Cancelled("the request was cancelled", request=event.request_id)
        elif self._draining:
            error = NoWorker("this decode worker is draining", request=event.request_id)
        else:
            self._landings.reserve(event, out)
            return
        out.append(Refuse(question=Question.RESERVE, lease_id=event.lease_id, error=error))

    def _commit(self, event: events.CommitRequested, now: float, out: list[Action]) -> None:
        self._tombstones.seen(event.request.request_id, now)
        self._landings.commit(event, now, out)

    def _cancel(self, event: events.RequestCancelled, now: float, out: list[Action]) -> None:
        landing = self._landings.cancel(event.request_id, now, out)
        running = self._schedule.cancel(event.request_id)
        if not landing and not running:
            self._tombstones.put(event.request_id, now)

    def _lose_gateway(self, event: events.GatewayLost, now: float, out: list[Action]) -> None:
        self._landings.drop_gateway(event.gateway_id, now, out)
        self._schedule.drop_gateway(event.gateway_id)

    def _drain(self, event: events.Draining, now: float, out: list[Action]) -> None:
        self._draining = event.is_on
        if event.is_on:
            self._landings.refuse_queued(NoWorker("this decode worker is draining"), out)

    def _stop(self, event: events.Stopped, now: float, out: list[Action]) -> None:
        self._draining = True
        stopping = NoWorker("the decode worker is stopping")
        self._landings.stop(stopping, now, out)
        self._schedule.fail_all(stopping, out)

    # -- what follows from any event

    def _advance(self, now: float, out: list[Action]) -> None:
        """Landed prompts become sequences, the next step starts, and what is left over is granted."""
        if self._landings.landed:
            self._take_landed()
        num_steps = 0
        while slices := self._schedule.next_step(now, out):
            # First: tokens travel while the engine computes, not before.
            out.insert(num_steps, RunStep(slices=slices))
            num_steps += 1
        if self._landings.num_queued and not self._schedule.has_preempted and self._may_grant:
            self._landings.admit(now, out)

    @property
    def _may_grant(self) -> bool:
        """Whether nobody else waits for blocks."""
        return True

    def _take_landed(self) -> None:
        for lease in self._landings.landed:
            assert lease.commit is not None, "landed without a commit"
            request = lease.commit.request
            deadline_at = lease.committed_at + request.timeout_s
            sequence = self._schedule.add(request, lease.blocks, deadline_at)
            sequence.landed = Landed(committed_at=lease.committed_at, transfer_s=lease.commit.transfer_s)
        self._landings.landed.clear()

    def _claims(self) -> Iterator[Holder]:
        """Everybody who has blocks, or will."""
        yield from self._landings.claims()
        yield from self._schedule.claims()

    # -- proof

    def _other_references(self) -> Counter[int]:
        """To blocks, of those who are neither landings nor sequences."""
        references: Counter[int] = Counter()
        for blocks in self._keeping.held_blocks():
            references.update(blocks)
        return references

    def validate(self) -> None:
        """Raises AssertionError unless free + held + leased = all blocks and references = holders."""
        self.pool.validate()
        self._landings.validate()
        self._schedule.validate()
        self._allotment.validate()
        self._keeping.validate()
        references = self._other_references()
        for lease in self._landings.leases:
            references.update(lease.blocks)
        for sequence in self._schedule.holders():
            references.update(sequence.block_table)
        for block in range(self.pool.num_blocks):
            assert self.pool.references_of(block) == references[block], f"block {block} leaks"
        total = self.pool.num_free + self.num_held_blocks + self.num_leased_blocks
        assert total <= self.pool.num_blocks, "there are more blocks than there are"
