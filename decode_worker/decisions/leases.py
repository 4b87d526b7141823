"""Reservations and leases of prompts' KV, from the reservation to the accepted commit.

Owns the queue of reservations (first come, first served) and the leases. Does not know sequences: a lease whose
commit was accepted and whose window is closed moves to `landed` together with its blocks.
"""

from collections.abc import Iterator
from dataclasses import replace

from moonserve.decode_worker.decisions.admission_and_preemption import Admission, Prospect
from moonserve.decode_worker.decisions.events import (
    AnswerCommit,
    CloseWindow,
    CommitRequested,
    ConfirmRenewal,
    LeaseCall,
    LeaseRenewed,
    Refuse,
    ReserveRequested,
    Verified,
    VerifyBlocks,
)
from moonserve.decode_worker.decisions.lease_phases import Ending, Lease, LeasePhase, prospect_of
from moonserve.decode_worker.decisions.limits_and_counters import Counters, Limits
from moonserve.engine.admission_policy import BlockHolder
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.protocol.errors import Cancelled, InvalidRequest, MoonserveError, NoWorker, Overloaded, StaleLease
from moonserve.protocol.kv_blocks import NO_PARENT
from moonserve.protocol.request import BlockId, GatewayId, LeaseId, RequestId
from moonserve.worker.alarms_and_tombstones import Alarms
from moonserve.worker.events import Action, Fail

# A repeated call about an ended lease gets the same answer for this long. It is longer than any call's deadline.
ENDED_LEASE_TTL_S = 60.0


class LeaseTable:
    """Decides which peers may write into which blocks. Methods append actions to `out`. Alarms that are due ring before
    the event of the same instant is handled, so a lease that is OPEN has not expired."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        alarms: Alarms,
        counters: Counters,
        admission: Admission,
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._limits = limits
        self._alarms = alarms
        self._counters = counters
        self._queue: dict[LeaseId, ReserveRequested] = {}  # in order of arrival
        self._leases: dict[LeaseId, Lease] = {}
        self._ended: dict[LeaseId, Ending] = {}
        self.landed: list[Lease] = []  # committed, window closed; the owner takes and clears them

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_leased_blocks(self) -> int:
        """Number of blocks in windows that are open or being closed."""
        return sum(len(lease.landing_blocks) for lease in self._leases.values())

    @property
    def leases(self) -> Iterator[Lease]:
        """All leases that still own their blocks."""
        return iter(self._leases.values())

    def claims(self) -> Iterator[BlockHolder]:
        """Yields the leases whose blocks will belong to sequences, as holders."""
        for lease in (*self._leases.values(), *self.landed):
            if lease.phase is not LeasePhase.ENDING:
                yield BlockHolder(lease.prospect, lease.blocks)

    # -- reserve

    def reserve(self, event: ReserveRequested, out: list[Action]) -> None:
        lease = self._leases.get(event.lease_id)
        if lease is not None:
            self._grant_again(lease, event, out)
        elif event.lease_id in self._ended:
            self._refuse_reservation(event.lease_id, self._error_of_ended(event.lease_id), out)
        elif self._limits.blocks_for(event.num_tokens + 1) > self._pool.capacity:
            self._refuse_reservation(event.lease_id, self._too_long(event), out)
        else:
            self._queue[event.lease_id] = event
            self._alarms.schedule(event.deadline_at, self._refuse_after_deadline, event.lease_id)

    def grant_queued(self, now: float, out: list[Action]) -> None:
        """Grants reservations in order of arrival until one has to wait for blocks."""
        while self._queue:
            event = next(iter(self._queue.values()))
            if self._limits.blocks_for(event.num_tokens + 1) > self._pool.capacity:
                self._refuse_queued(event.lease_id, self._too_long(event), out)
                continue
            prospect = prospect_of(event, self._limits.max_model_len)
            num_blocks = self._limits.blocks_for(event.num_tokens)
            blocks = self._admission.admit(prospect, event.block_keys, num_blocks)
            if blocks is None:
                return
            del self._queue[event.lease_id]
            self._grant(event, prospect, *blocks, now, out)

    def withdraw(self, lease_id: LeaseId) -> None:
        """Removes a reservation from the queue. A granted reservation is left to expire."""
        self._queue.pop(lease_id, None)

    def _refuse_after_deadline(self, lease_id: LeaseId, now: float, out: list[Action]) -> None:
        """Refuses a queued reservation if its deadline has passed."""
        event = self._queue.get(lease_id)
        if event is not None and event.deadline_at <= now:
            missing = self._limits.blocks_for(event.num_tokens)
            error = Overloaded(
                f"no room for {event.num_tokens} tokens of KV in time",
                retry_after_s=self._pool.retry_after_s(now, missing),
                request=event.request_id,
            )
            self._refuse_queued(lease_id, error, out)

    def _grant(
        self,
        event: ReserveRequested,
        prospect: Prospect,
        shared: list[BlockId],
        fresh: list[BlockId],
        now: float,
        out: list[Action],
    ) -> None:
        lease = Lease(
            lease_id=event.lease_id,
            prospect=prospect,
            num_tokens=event.num_tokens,
            block_keys=event.block_keys,
            blocks=(*shared, *fresh),
            num_cached=len(shared),
            ttl_s=event.ttl_s,
            expires_at=now + event.ttl_s,
        )
        self._leases[lease.lease_id] = lease
        self._counters.leases_granted += 1
        self._counters.shared_blocks += len(shared)
        self._alarms.schedule(lease.expires_at, self._expire, lease.lease_id)
        out.append(lease.grant)

    def _grant_again(self, lease: Lease, event: ReserveRequested, out: list[Action]) -> None:
        if (lease.holder, lease.num_tokens) != (event.request_id, event.num_tokens):
            error = InvalidRequest("this lease id is in use", lease=lease.lease_id)
            self._refuse_reservation(event.lease_id, error, out)
        elif lease.phase is LeasePhase.OPEN:
            out.append(lease.grant)
        else:
            self._refuse_reservation(event.lease_id, self._error_of_ended(event.lease_id), out)

    # -- renew, release, expire

    def renew(self, event: LeaseRenewed, now: float, out: list[Action]) -> None:
        lease = self._leases.get(event.lease_id)
        if lease is None or lease.phase is LeasePhase.ENDING:
            error = self._error_of_ended(event.lease_id)
            out.append(Refuse(call=LeaseCall.RENEW, lease_id=event.lease_id, error=error))
            return
        lease.ttl_s = event.ttl_s
        self._extend(lease, now)
        out.append(ConfirmRenewal(lease_id=event.lease_id))

    def release(self, lease_id: LeaseId, now: float, out: list[Action]) -> None:
        """Ends a lease or a queued reservation. An unknown id is remembered, and its reservation is refused later.
        Releasing an accepted commit has no effect."""
        lease = self._leases.get(lease_id)
        if lease_id in self._queue:
            self._refuse_queued(lease_id, StaleLease("lease was released", lease=lease_id), out)
        if lease is None:
            self._remember(lease_id, Ending.RELEASED, now)
        elif lease.phase is not LeasePhase.SEALING:
            self._end(lease, Ending.RELEASED, now, out)

    def _expire(self, lease_id: LeaseId, now: float, out: list[Action]) -> None:
        """Ends a lease if its time has run out."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.expiry_at is not None and lease.expiry_at <= now:
            self._counters.leases_expired += 1
            self._end(lease, Ending.EXPIRED, now, out)

    def _forget_ended(self, lease_id: LeaseId, _now: float, _out: list[Action]) -> None:
        self._ended.pop(lease_id, None)

    def _extend(self, lease: Lease, now: float) -> None:
        lease.expires_at = now + lease.ttl_s
        self._alarms.schedule(lease.expires_at, self._expire, lease.lease_id)

    def _end(self, lease: Lease, ending: Ending, now: float, out: list[Action]) -> None:
        """Begins the end of a lease. Its blocks are freed once the window is closed."""
        before = lease.phase
        if before is LeasePhase.ENDING:
            return
        lease.enter(LeasePhase.ENDING)
        lease.ending, lease.commit = ending, None
        if before is LeasePhase.VERIFYING:
            self._refuse_commit(lease.lease_id, self._error_of_ended(lease.lease_id), out)
        if not lease.landing_blocks:
            self.on_window_closed(lease.lease_id, now)
        elif before is not LeasePhase.SEALING:
            out.append(CloseWindow(lease_id=lease.lease_id))

    # -- commit

    def commit(self, event: CommitRequested, now: float, out: list[Action]) -> None:
        lease = self._leases.get(event.lease_id)
        if lease is None and self._ended.get(event.lease_id) is Ending.COMMITTED:
            out.append(AnswerCommit(lease_id=event.lease_id))
        elif lease is None or lease.phase is LeasePhase.ENDING:
            self._refuse_commit(event.lease_id, self._error_of_ended(event.lease_id), out)
        elif lease.phase is LeasePhase.SEALING:
            out.append(AnswerCommit(lease_id=event.lease_id))
        elif lease.phase is LeasePhase.OPEN:  # VERIFYING: the check in flight answers this call, too
            self._verify(lease, event, now, out)

    def _verify(self, lease: Lease, event: CommitRequested, now: float, out: list[Action]) -> None:
        error = lease.commit_error(event, self._limits.max_model_len)
        if error is not None:
            self._refuse_commit(event.lease_id, error, out)
            return
        lease.enter(LeasePhase.VERIFYING)
        lease.commit, lease.committed_at = event, now
        blocks = lease.written_blocks(event, self._limits.block_size)
        if blocks:
            request_id = event.request.request_id
            out.append(VerifyBlocks(request_id=request_id, lease_id=lease.lease_id, blocks=blocks))
        else:
            self._accept(lease, now, out)

    def on_verified(self, event: Verified, now: float, out: list[Action]) -> None:
        lease = self._leases.get(event.lease_id)
        if lease is None or lease.phase is not LeasePhase.VERIFYING:
            return  # the lease has ended meanwhile
        if not event.corrupt:
            if event.checksums and lease.commit is not None:
                lease.commit = replace(lease.commit, checksums=event.checksums)
            self._accept(lease, now, out)
            return
        self._counters.integrity_failures += len(event.corrupt)
        lease.enter(LeasePhase.OPEN)
        lease.commit = None
        self._extend(lease, now)
        out.append(AnswerCommit(lease_id=event.lease_id, corrupt=event.corrupt))

    def _accept(self, lease: Lease, now: float, out: list[Action]) -> None:
        lease.enter(LeasePhase.SEALING)
        self._counters.commits_accepted += 1
        self._counters.landed_blocks += len(lease.landing_blocks)
        out.append(AnswerCommit(lease_id=lease.lease_id))
        if lease.landing_blocks:
            out.append(CloseWindow(lease_id=lease.lease_id, landed=lease.landing_blocks))
        else:
            self.on_window_closed(lease.lease_id, now)

    def on_window_closed(self, lease_id: LeaseId, now: float) -> None:
        """Disposes of a lease whose window is closed: its blocks go to `landed` after a commit, else to the pool."""
        lease = self._leases.pop(lease_id)
        if lease.ending is not None:
            self._pool.release(lease.blocks)
            self._remember(lease_id, lease.ending, now)
        else:
            self._publish(lease)
            self._remember(lease_id, Ending.COMMITTED, now)
            self.landed.append(lease)

    def _publish(self, lease: Lease) -> None:
        """Makes the landed full blocks findable, so that later reservations with the same leading keys share them."""
        if lease.commit is None:
            raise RuntimeError(f"lease {lease.lease_id} is sealed without a commit")
        if not lease.commit.request.cache_hints.store:
            return
        sent = list(zip(lease.landing_blocks, lease.commit.checksums, strict=True))
        for index, key in enumerate(lease.block_keys[lease.num_cached :], start=lease.num_cached):
            block, checksum = sent[index - lease.num_cached]
            parent = lease.block_keys[index - 1] if index else NO_PARENT
            self._pool.publish(block, key, parent, checksum)

    # -- ends caused by other events

    def cancel(self, request_id: RequestId, now: float, out: list[Action]) -> bool:
        """Ends all reservations and leases of a request. Returns False if there were none."""
        queued = [key for key, event in self._queue.items() if event.request_id == request_id]
        for lease_id in queued:
            self._refuse_queued(lease_id, Cancelled("the request was cancelled", request=request_id), out)
        ending = [lease for lease in self._unended() if lease.holder == request_id]
        for lease in ending:
            self._end(lease, Ending.CANCELLED, now, out)
        return bool(queued or ending)

    def drop_gateway(self, gateway_id: GatewayId, now: float, out: list[Action]) -> None:
        """Ends committed leases whose tokens would go to a lost gateway."""
        for lease in self._unended():
            if lease.commit is not None and lease.commit.request.gateway_id == gateway_id:
                self._end(lease, Ending.CANCELLED, now, out)

    def refuse_queued(self, error: MoonserveError, out: list[Action]) -> None:
        for lease_id in list(self._queue):
            self._refuse_queued(lease_id, error, out)

    def stop(self, error: MoonserveError, now: float, out: list[Action]) -> None:
        """Refuses all reservations and ends all leases. Requests whose commit was accepted fail with `error`."""
        self.refuse_queued(error, out)
        for lease in self._unended():
            accepted = lease.commit if lease.phase is LeasePhase.SEALING else None
            self._end(lease, Ending.STOPPED, now, out)
            if accepted is not None:
                request = accepted.request
                self._counters.requests_failed += 1
                out.append(Fail(gateway_id=request.gateway_id, request_id=request.request_id, error=error))

    def _unended(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.phase is not LeasePhase.ENDING]

    # -- answers

    def _refuse_queued(self, lease_id: LeaseId, error: MoonserveError, out: list[Action]) -> None:
        self.withdraw(lease_id)
        self._refuse_reservation(lease_id, error, out)

    def _refuse_reservation(self, lease_id: LeaseId, error: MoonserveError, out: list[Action]) -> None:
        self._counters.reserves_refused += 1
        out.append(Refuse(call=LeaseCall.RESERVE, lease_id=lease_id, error=error))

    def _refuse_commit(self, lease_id: LeaseId, error: MoonserveError, out: list[Action]) -> None:
        self._counters.commits_rejected += 1
        out.append(Refuse(call=LeaseCall.COMMIT, lease_id=lease_id, error=error))

    def _error_of_ended(self, lease_id: LeaseId) -> MoonserveError:
        """Returns the error that says why a lease cannot be used any more."""
        lease = self._leases.get(lease_id)
        ending = lease.ending if lease is not None else self._ended.get(lease_id)
        if ending is Ending.CANCELLED:
            return Cancelled("the request was cancelled", lease=lease_id)
        if ending is Ending.STOPPED:
            return NoWorker("the decode worker is stopping", lease=lease_id)
        state = ending or (f"is {lease.phase}" if lease is not None else "is unknown")
        return StaleLease(f"lease {state}", lease=lease_id)

    def _too_long(self, event: ReserveRequested) -> InvalidRequest:
        return InvalidRequest(
            f"{event.num_tokens} tokens never fit into this worker's {self._pool.capacity} "
            f"blocks of {self._limits.block_size} tokens",
            request=event.request_id,
        )

    def _remember(self, lease_id: LeaseId, ending: Ending, now: float) -> None:
        if lease_id not in self._ended:
            self._ended[lease_id] = ending
            self._alarms.schedule(now + ENDED_LEASE_TTL_S, self._forget_ended, lease_id)

    # -- proof

    def validate(self) -> None:
        """Raises AssertionError unless every landing block is held by exactly one lease and is not findable."""
        landing = [block for lease in self._leases.values() for block in lease.landing_blocks]
        assert len(landing) == len(set(landing)), "two leases share a landing block"
        for block in landing:
            assert self._pool.references_of(block) == 1, f"landing block {block} is shared"
            assert self._pool.key_of(block) is None, f"landing block {block} can be found"
        assert not self._queue.keys() & self._leases.keys(), "a queued reservation is granted"
        assert not self._ended.keys() & self._leases.keys(), "a lease that is over is alive"
