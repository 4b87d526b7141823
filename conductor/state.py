"""The conductor as a pure state machine: events in, actions out, time as an argument.

It owns membership, the prefix index, the predicted load of every instance and the record of decisions. Rule: the load
that a placement adds is removed exactly once, by a report, by a heartbeat that contradicts it, by a new placement of
the same request, or when the placement expires. It does not know sockets, clocks, token ids or tensors; the live
service and the simulator drive the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conductor.admission import FOR_LOAD, TTFT_SLO, Admission
from conductor.cost.accuracy import Term, TermAccuracy
from conductor.decision import Decision, Rejection
from conductor.decision_log import DecisionLog
from conductor.events import (
    Action,
    Away,
    BlockChanges,
    Deregister,
    Deregistered,
    Event,
    Heartbeat,
    HeartbeatSeen,
    InstanceJoined,
    InstanceRemoved,
    Phase,
    Place,
    Placed,
    PlacementForgotten,
    Refused,
    Register,
    Registered,
    Rejected,
    Removal,
    Report,
    Reported,
    RoleChangeDue,
    Tick,
    TtftObserved,
)
from conductor.fairness.shares import Fairness
from conductor.flights import Flight, Flights, outcome
from conductor.learned import Fading, Learned
from conductor.limits import Limits
from conductor.members import Instance, Members
from conductor.placement import Planner
from conductor.policies.base import PlacementPolicy
from conductor.returns import Returns
from conductor.roles.controller import RoleController, RoleLoads
from conductor.view import ClusterView, InstanceView
from kvstore.directory import Directory
from protocol.errors import MoonserveError, StaleLease
from protocol.ids import Role
from protocol.request import Placement


class ConductorState:
    """Holds the state of the whole cluster and decides every placement."""

    def __init__(
        self,
        policy: PlacementPolicy,
        limits: Limits,
        roles: RoleController | None = None,
    ) -> None:
        """`roles`: None = workers do not change roles."""
        self._limits = limits
        self._members = Members(limits.lease_s)
        self._directory = Directory()
        self._learned = Learned()
        self._fairness = Fairness(limits.tenant_weights)
        self._planner = Planner(self._members, self._directory, self._learned, self._fairness, policy, limits)
        self._returns = Returns()
        self._decisions = DecisionLog(limits.num_decisions, limits.decision_bytes)
        self._roles = roles
        self._fading = Fading(self._members, self._learned)
        self._role_loads = RoleLoads(self._members, ttft_slo_s=limits.ttft_slo_s, tbt_slo_s=limits.tbt_slo_s)
        self._flights = Flights(self._learned, self._members.transfers, self._fairness, limits.placement_ttl_s)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Applies one event at monotonic time `now` and returns the actions. If the event is a call, its reply is the
        last action."""
        actions = [] if isinstance(event, Away) else self._expire(now)
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
                return [self._heartbeat(event, now)]
            case Report():
                return self._report(event, now)
            case Register():
                return self._register(event, now)
            case Deregister():
                return self._deregister(event)
            case Away():
                self._members.excuse(event.seconds, now)
                return []
            case Tick():
                self._fading.look(now)
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
                actions.append(self._remove(known, Removal.REPLACED))
            instance = self._members.add(event, now)
            # Enter the instance into the index before its first block, so that every table row has an index number.
            self._directory.apply(instance.instance_id, event.endpoint.epoch, (), (), 1, 1, False)
            instance.index_as(self._directory.bit(instance.instance_id))
            actions.append(InstanceJoined(instance_id=instance.instance_id, role=instance.role))
        limits = self._limits
        actions.append(Registered(heartbeat_interval_s=limits.heartbeat_interval_s, lease_s=limits.lease_s))
        return actions

    def _heartbeat(self, event: Heartbeat, now: float) -> HeartbeatSeen:
        instance = self._members.find(event.instance_id)
        if instance is None or instance.endpoint.epoch < event.epoch:
            return HeartbeatSeen(known=False)
        if instance.endpoint.epoch > event.epoch:
            raise StaleLease(
                f"{event.instance_id} epoch {event.epoch} was replaced by epoch {instance.endpoint.epoch}",
                instance_id=event.instance_id,
            )
        instance.heard_at = now
        instance.drain(event.draining)
        instance.load = event.load
        self._members.learn(instance, event.load)
        if instance.role is Role.PREFILL:
            prefill_profile = instance.registration.prefill_profile
            for request_id in instance.queue.correct(event.load, prefill_profile, now):
                self._fairness.prefilled(request_id)
        elif instance.role is Role.DECODE:
            profile = instance.decode_cost.current
            instance.decode.correct(event.load, profile, self._learned.lengths, now)
        return HeartbeatSeen(known=True, resync=not self._index(instance, event.changes))

    def _index(self, instance: Instance, changes: BlockChanges | None) -> bool:
        """Applies block changes to the index. Returns False if earlier changes were missed."""
        if changes is None:
            return True
        applied = self._directory.apply(
            instance.instance_id,
            instance.endpoint.epoch,
            changes.added,
            changes.removed,
            changes.first_seq,
            changes.next_seq,
            changes.snapshot,
        )
        instance.index_as(self._directory.bit(instance.instance_id))
        return applied

    def _deregister(self, event: Deregister) -> list[Action]:
        instance = self._members.incarnation(event.instance_id, event.epoch)
        actions: list[Action] = []
        if instance is not None:
            actions.append(self._remove(instance, Removal.LEFT))
        actions.append(Deregistered())
        return actions

    def _remove(self, instance: Instance, reason: Removal) -> InstanceRemoved:
        if instance.role is not Role.STORE:
            self._fairness.lost(instance.link)
        self._members.remove(instance)
        self._directory.drop(instance.instance_id)
        return InstanceRemoved(instance_id=instance.instance_id, role=instance.role, reason=reason)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = [self._remove(instance, Removal.SILENT) for instance in self._members.silent(now)]
        actions += [PlacementForgotten(request_id=r) for r in self._flights.expire(now)]
        return actions

    def _change_roles(self, now: float) -> list[Action]:
        if self._roles is None:
            return []
        change = self._roles.decide(self._role_loads.at(now), now)
        if change is None:
            return []
        worker = self._members.find(change.instance_id)
        assert worker is not None, "loads are of members"
        return [RoleChangeDue(endpoint=worker.endpoint, role=change.role)]

    # ---- placement

    def _place(self, event: Place, now: float) -> list[Action]:
        self._flights.end(event.request_id, now)  # placed again after a failure or a lost reply
        plan = self._planner.plan(event, now)
        decision = plan.decision
        if self._limits.admission is not Admission.NONE:
            decision = self._returns.judged(decision, event.ticket, now)
        self._decisions.record(decision, event.client_id)
        if decision.rejection is not None:
            self._fading.refused()
            if decision.rejection.reason == TTFT_SLO:
                self._role_loads.refused(now)
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
        self._flights.begin(event, plan, now)
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
        ttft_slo_s, tbt_slo_s = self._limits.of(event)
        is_usual = ttft_slo_s >= self._limits.ttft_slo_s and tbt_slo_s >= self._limits.tbt_slo_s
        if rejection.reason in FOR_LOAD and is_usual:
            self._fairness.claim(event.tenant, now, rejection.retry_after_s)

    # ---- reports

    def _report(self, event: Report, now: float) -> list[Action]:
        flight = self._flights.find(event.request_id)
        if flight is None:  # the conductor was restarted since, or the placement has expired
            return [Reported()]
        actions: list[Action] = []
        match event.phase:
            case Phase.FIRST_TOKEN:
                if flight.ttft_s is None:
                    self._flights.first_token(event, flight, now)
                    actions.append(_observed(event, flight))
            case Phase.FINISHED:
                self._flights.finished(event, flight, now)
            case Phase.FAILED | Phase.CANCELLED:
                self._flights.end(event.request_id, now, event.output_tokens)
        self._decisions.conclude(event.request_id, outcome(event, flight))
        actions.append(Reported())
        return actions

    # ---- queries

    def explain(self, known_id: str) -> Decision | None:
        """Returns the latest decision about a request, found by its id or by the client's name for it. Returns None if
        there was no decision or if it has left the record."""
        return self._decisions.find(known_id)

    @property
    def decisions(self) -> DecisionLog:
        return self._decisions

    def ttft_accuracy(self) -> Mapping[Term, TermAccuracy]:
        """Returns the recent prediction accuracy of every TTFT term that was observed."""
        found = ((term, self._learned.accuracy.of(term)) for term in Term)
        return {term: accuracy for term, accuracy in found if accuracy is not None}

    def cluster(self, now: float) -> ClusterView:
        """Returns the live instances and the properties that all workers share."""
        loads = {load.instance_id: load for load in self._role_loads.at(now)}
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
        self._decisions.validate()
        self._returns.validate()
        self._flights.validate(self._members)
        self._learned.validate()
        self._fairness.validate()
        self._role_loads.validate()


def _observed(event: Report, flight: Flight) -> TtftObserved:
    return TtftObserved(
        request_id=event.request_id,
        predicted_s=flight.predicted.ttft_s,
        actual_s=event.elapsed_s,
    )
