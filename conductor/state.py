"""The conductor as a pure state machine: events in, actions out, time as an argument.

It owns membership, the prefix index, the predicted load of every instance and the record of decisions. Rule: the load
that a placement adds is removed exactly once, by a report, by a heartbeat that contradicts it, by a new placement of
the same request, or when the placement expires. It does not know sockets, clocks, token ids or tensors; the live
service and the simulator drive the same object.
"""

from collections.abc import Mapping, Sequence

from moonserve.conductor.events import (
    Action,
    BlockChanges,
    Deregister,
    Deregistered,
    Event,
    Heartbeat,
    HeartbeatSeen,
    InstanceJoined,
    InstanceRemoved,
    Place,
    Placed,
    PlacementForgotten,
    Redirected,
    Refused,
    Register,
    Registered,
    Rejected,
    RemovalReason,
    Report,
    Reported,
    RoleChangeDue,
    Suspended,
    Tick,
    TtftObserved,
)
from moonserve.conductor.members import Instance, Members
from moonserve.conductor.peers import ShardSummary
from moonserve.conductor.peers.shard_state import ShardState
from moonserve.conductor.placement.admission import LOAD_REASONS, TTFT_SLO, AdmissionMode, Limits
from moonserve.conductor.placement.decision import Decision, DecisionLog, Rejection
from moonserve.conductor.placement.in_flight import InFlightRequests, outcome_of
from moonserve.conductor.placement.planner import PlacementPlanner
from moonserve.conductor.placement.policies.base import PlacementPolicy
from moonserve.conductor.placement.retry_promises import RetryPromises
from moonserve.conductor.placement.tenant_fairness import Fairness
from moonserve.conductor.prediction.accuracy import Term, TermAccuracy
from moonserve.conductor.prediction.learned_estimates import EstimateDecay, LearnedEstimates
from moonserve.conductor.role_switching import RoleController, RoleLoads
from moonserve.conductor.wire import ClusterView, InstanceView
from moonserve.kvstore.directory import Directory
from moonserve.protocol.errors import MoonserveError, StaleLease
from moonserve.protocol.request import Placement, RequestPhase, Role


class ConductorState:
    """Holds the state of the whole cluster and decides every placement."""

    def __init__(
        self,
        policy: PlacementPolicy,
        limits: Limits,
        roles: RoleController | None = None,
        shard: ShardState | None = None,
    ) -> None:
        """`roles`: None = workers do not change roles. `shard`: None = this is the only active conductor."""
        self._limits = limits
        self._members = Members(limits.lease_s)
        self._directory = Directory()
        self._learned = LearnedEstimates()
        self._fairness = Fairness(limits.tenant_weights)
        self._planner = PlacementPlanner(self._members, self._directory, self._learned, self._fairness, policy, limits)
        self._promises = RetryPromises()
        self.decisions = DecisionLog(limits.num_decisions, limits.decision_bytes)
        self._roles = roles
        self._shard = shard
        self._estimate_decay = EstimateDecay(self._members, self._learned)
        self._role_loads = RoleLoads(self._members, ttft_slo_s=limits.ttft_slo_s, tbt_slo_s=limits.tbt_slo_s)
        self._in_flight = InFlightRequests(
            self._learned, self._members.transfers, self._fairness, limits.placement_ttl_s
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies one event at monotonic time `now` and returns the actions. If the event is a call, its reply is the
        last action."""
        actions = [] if isinstance(event, Suspended) else self._expire(now)
        try:
            actions += self._apply(event, now)
        except MoonserveError as error:
            actions.append(Refused(error=error))
        return actions

    def _apply(self, event: Event, now: float) -> list[Action]:
        match event:
            case Place():
                return self._place(event, now)
            case Heartbeat():
                return self._heartbeat(event, now)
            case Report():
                return self._report(event, now)
            case Register():
                return self._register(event, now)
            case Deregister():
                return self._deregister(event)
            case Suspended():
                self._members.extend_leases(event.seconds, now)
                return []
            case Tick():
                self._estimate_decay.decay(now)
                return self._change_roles(now)

    # ---- membership

    def _register(self, event: Register, now: float) -> list[Action]:
        self._members.check(event)
        actions: list[Action] = []
        known = self._members.find(event.endpoint.instance_id)
        if known is not None and known.registration == event:  # a repeated call
            known.heard_at = now
        else:
            if known is not None:
                actions.append(self._remove(known, RemovalReason.REPLACED))
            instance = self._members.add(event, now)
            if self._shard is not None:
                self._shard.joined(now)
            # Enter the instance into the index before its first block, so that every table row has an index number.
            self._directory.apply_pairs(instance.instance_id, event.endpoint.epoch, (), (), 1, 1, False)
            instance.set_directory_bit(self._directory.bit(instance.instance_id))
            actions.append(InstanceJoined(instance_id=instance.instance_id, role=instance.role))
        limits = self._limits
        actions.append(Registered(heartbeat_interval_s=limits.heartbeat_interval_s, lease_s=limits.lease_s))
        return actions

    def _heartbeat(self, event: Heartbeat, now: float) -> list[Action]:
        instance = self._members.find(event.instance_id)
        if instance is None or instance.endpoint.epoch < event.epoch:
            return [HeartbeatSeen(known=False)]
        if instance.endpoint.epoch > event.epoch:
            raise StaleLease(
                f"{event.instance_id} epoch {event.epoch} was replaced by epoch {instance.endpoint.epoch}",
                instance_id=event.instance_id,
            )
        if self._shard is not None and (address := self._shard.move_of(instance.instance_id, now)) is not None:
            return [self._remove(instance, RemovalReason.MOVED), HeartbeatSeen(known=False, move_to=address)]
        instance.heard_at = now
        instance.drain(event.draining)
        instance.load = event.load
        self._members.observe_heartbeat(instance, event.load)
        if instance.role is Role.PREFILL:
            prefill_profile = instance.registration.prefill_profile
            for request_id in instance.queue.correct(event.load, prefill_profile, now):
                self._fairness.prefilled(request_id)
        elif instance.role is Role.DECODE:
            profile = instance.decode_cost.current
            instance.decode.correct(event.load, profile, self._learned.lengths, now)
        return [HeartbeatSeen(known=True, resync=not self._index(instance, event.changes))]

    def _index(self, instance: Instance, changes: BlockChanges | None) -> bool:
        """Applies block changes to the index. Returns False if earlier changes were missed."""
        if changes is None:
            return True
        applied = self._directory.apply_pairs(
            instance.instance_id,
            instance.endpoint.epoch,
            changes.added,
            changes.removed,
            changes.first_seq,
            changes.next_seq,
            changes.snapshot,
        )
        instance.set_directory_bit(self._directory.bit(instance.instance_id))
        return applied

    def _deregister(self, event: Deregister) -> list[Action]:
        instance = self._members.find(event.instance_id)
        actions: list[Action] = []
        if instance is not None and instance.endpoint.epoch == event.epoch:
            actions.append(self._remove(instance, RemovalReason.LEFT))
        actions.append(Deregistered())
        return actions

    def _remove(self, instance: Instance, reason: RemovalReason) -> InstanceRemoved:
        if instance.role is not Role.STORE:
            self._fairness.drop_instance(instance.link)
        self._members.remove(instance)
        self._directory.drop(instance.instance_id)
        return InstanceRemoved(instance_id=instance.instance_id, role=instance.role, reason=reason)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = [self._remove(instance, RemovalReason.SILENT) for instance in self._members.silent(now)]
        actions += [PlacementForgotten(request_id=r) for r in self._in_flight.expire(now)]
        return actions

    def _change_roles(self, now: float) -> list[Action]:
        if self._roles is None:
            return []
        change = self._roles.decide(self._role_loads.worker_loads(now), now)
        if change is None:
            return []
        worker = self._members.find(change.instance_id)
        assert worker is not None, "loads are of members"
        return [RoleChangeDue(endpoint=worker.endpoint, role=change.role)]

    # ---- placement

    def _place(self, event: Place, now: float) -> list[Action]:
        self._in_flight.end(event.request_id, now)  # placed again after a failure or a lost reply
        plan = self._planner.plan(event, now)
        if self._shard is not None and (address := self._shard.elsewhere(event, plan)) is not None:
            return [Redirected(address=address)]
        decision = plan.decision
        if self._limits.admission is not AdmissionMode.NONE:
            decision = self._promises.final_decision(decision, event.ticket, now)
        self.decisions.record(decision, event.client_id)
        if decision.rejection is not None:
            self._estimate_decay.on_rejection()
            if decision.rejection.reason == TTFT_SLO:
                self._role_loads.on_rejection(now)
            self._claim(event, decision.rejection, now)
            return [
                Rejected(
                    predicted_ttft_s=decision.predicted_ttft_s,
                    predicted_tbt_s=decision.predicted_tbt_s,
                    retry_after_s=decision.rejection.retry_after_s,
                    reason=decision.rejection.reason,
                    decision=decision,
                )
            ]
        self._in_flight.begin(event, plan, now)
        placement = Placement(
            request_id=event.request_id,
            prefill=plan.prefill.endpoint,
            decode=plan.decode.endpoint,
            prefix_sources=plan.sources,
            predicted_ttft_s=decision.predicted_ttft_s,
            predicted_tbt_s=decision.predicted_tbt_s,
            rank=plan.rank,
        )
        return [Placed(placement=placement, decision=decision)]

    def _claim(self, event: Place, rejection: Rejection, now: float) -> None:
        """Gives the tenant of a request rejected for load a claim to the next free capacity. Requests with stricter
        objectives than the default get none, because such a tenant could hold a claim all the time."""
        ttft_slo_s, tbt_slo_s = self._limits.objectives(event)
        is_usual = ttft_slo_s >= self._limits.ttft_slo_s and tbt_slo_s >= self._limits.tbt_slo_s
        if rejection.reason in LOAD_REASONS and is_usual:
            self._fairness.claim(event.tenant, now, rejection.retry_after_s)

    # ---- reports

    def _report(self, event: Report, now: float) -> list[Action]:
        flight = self._in_flight.find(event.request_id)
        if flight is None:  # the conductor was restarted since, or the placement has expired
            return [Reported()]
        actions: list[Action] = []
        match event.phase:
            case RequestPhase.FIRST_TOKEN:
                if flight.ttft_s is None:
                    self._in_flight.first_token(event, flight, now)
                    predicted_s, actual_s = flight.predicted.ttft_s, event.elapsed_s
                    observed = TtftObserved(request_id=event.request_id, predicted_s=predicted_s, actual_s=actual_s)
                    actions.append(observed)
            case RequestPhase.FINISHED:
                self._in_flight.finished(event, flight, now)
            case RequestPhase.FAILED | RequestPhase.CANCELLED:
                self._in_flight.end(event.request_id, now, event.output_tokens)
        self.decisions.conclude(event.request_id, outcome_of(event, flight))
        actions.append(Reported())
        return actions

    # ---- queries

    def tick_shard(self, now: float) -> ShardSummary:
        """Returns what the other active conductors should know. Requires a `shard`."""
        assert self._shard is not None
        return self._shard.tick(self._members, now)

    def explain(self, known_id: str) -> Decision | None:
        """Returns the latest decision about a request, found by its id or by the client's name for it. Returns
        None if there was no decision or if it has left the record."""
        return self.decisions.find(known_id)

    def ttft_accuracy(self) -> Mapping[Term, TermAccuracy]:
        """Returns the recent prediction accuracy of every TTFT term that was observed."""
        found = ((term, self._learned.accuracy.of(term)) for term in Term)
        return {term: accuracy for term, accuracy in found if accuracy is not None}

    def cluster(self, now: float) -> ClusterView:
        """Returns the live instances and the properties that all workers share."""
        loads = {load.instance_id: load for load in self._role_loads.worker_loads(now)}
        instances: Sequence[InstanceView] = [
            InstanceView(
                endpoint=instance.endpoint,
                role=instance.role,
                load=instance.load,
                num_blocks=instance.registration.num_blocks,
                draining=instance.draining,
                last_heard_s=max(now - instance.heard_at, 0.0),
                indexed_blocks=self._directory.num_blocks(instance.instance_id),
                can_switch_role=instance.registration.can_switch_role,
                need=loads[instance.instance_id].need if instance.instance_id in loads else 0.0,
                use=loads[instance.instance_id].use if instance.instance_id in loads else 0.0,
            )
            for instance in self._members
        ]
        working = {i.role for i in instances if not i.draining}
        return ClusterView(
            instances=tuple(instances),
            layout=self._members.layout,
            fingerprint=self._members.fingerprint,
            max_model_len=self._members.max_model_len,
            ready={Role.PREFILL, Role.DECODE} <= working,
            ttft_slo_s=self._limits.ttft_slo_s,
            tbt_slo_s=self._limits.tbt_slo_s,
            ttft_accuracy=self.ttft_accuracy(),
        )

    def validate(self) -> None:
        """Raises AssertionError if the predicted load disagrees with the requests in flight."""
        self._members.validate()
        self._directory.validate()
        self.decisions.validate()
        self._promises.validate()
        self._in_flight.validate(self._members)
        self._learned.validate()
        self._fairness.validate()
        self._role_loads.validate()
