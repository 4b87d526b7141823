"""A cluster whose machines change between prefill and decode if the conductor decides so, as live workers do.

See docs/role-switching.md. Each machine is two nodes, one per role, of which exactly one is alive. A change drains one
and starts the other. Requests that have not ended by then are placed again. A machine's part of the pool exists only
during its prefill role.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moonserve.conductor.events import Deregister, RoleChangeDue, Tick
from moonserve.protocol.request import InstanceId
from moonserve.traces.simulator.cluster.disaggregated import DisaggregatedCluster
from moonserve.traces.simulator.cluster.event_loop import Event, HeartbeatDue, RoleCheckDue, SampleDue, TimedEvent
from moonserve.traces.simulator.cluster.nodes import Node, PrefillNode
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.spec import ClusterSpec


class SwitchingCluster(DisaggregatedCluster):
    """A cluster that switches roles. `spec.num_prefill` and `num_decode` are the initial numbers."""

    def __init__(self, spec: ClusterSpec, requests: Sequence[RequestState]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        both = spec.num_prefill + spec.num_decode
        super().__init__(replace(spec, num_prefill=both, num_decode=both), requests)
        self.spec = spec
        self._node_of_other_role: dict[str, Node] = {}
        self._drain_deadlines: dict[str, float] = {}  # draining nodes by name → latest time of the change
        self._changes = 0
        for index, (prefill, decode) in enumerate(zip(self.prefills, self.decodes, strict=True)):
            self._node_of_other_role |= {prefill.name: decode, decode.name: prefill}
            later: Node = decode if index < spec.num_prefill else prefill
            later.is_alive = False

    def begin(self) -> Iterator[TimedEvent[Event]]:
        yield from super().begin()
        yield TimedEvent(0.0, RoleCheckDue())

    def _handle_event(self, event: Event, now: float) -> None:
        if not isinstance(event, RoleCheckDue):
            super()._handle_event(event, now)
            return
        self._check_roles(now)
        if self.gateway.num_open:
            self._schedule_at(now + self.spec.heartbeat_interval_s / 2, RoleCheckDue())

    def _check_roles(self, now: float) -> None:
        for action in self.conductor.handle(Tick(), now):
            if isinstance(action, RoleChangeDue):
                self._drain(self._nodes[action.endpoint.instance_id], now)
        for name, until in list(self._drain_deadlines.items()):
            node = self._nodes[name]
            if now >= until or not any(self._runs_on(request, node) for request in self._request_of.values()):
                self._switch_role(node, now)

    def _drain(self, node: Node, now: float) -> None:
        node.is_draining = True
        self._drain_deadlines[node.name] = now + self.spec.role_drain_s
        self.heartbeats.send_heartbeat(node, now)
        self._schedule_at(node.heartbeat_at, HeartbeatDue(node))

    def _switch_role(self, node: Node, now: float) -> None:
        del self._drain_deadlines[node.name]
        self._kill(node, now)
        names = [node.name, node.store_id] if isinstance(node, PrefillNode) else [node.name]
        for name in names:
            self.conductor.handle(Deregister(instance_id=InstanceId(name), epoch=node.epoch), now)
        node.is_draining = False
        self._start(self._node_of_other_role[node.name], now)
        self._changes += 1

    def _sample(self, now: float) -> None:
        prefills = [node for node in self.prefills if node.is_alive]
        self.samples.take(prefills, [node for node in self.decodes if node.is_alive], now)
        if self.gateway.num_open:
            self._schedule_at(now + self.spec.sample_interval_s, SampleDue())

    @property
    def counters(self) -> dict[str, float]:
        return super().counters | {"role_changes": self._changes}

    def validate(self) -> None:
        super().validate()
        for name, twin in self._node_of_other_role.items():
            assert self._nodes[name].is_alive is not twin.is_alive, "a machine has one role"
        assert all(self._nodes[name].is_draining for name in self._drain_deadlines)
        assert any(node.is_alive for node in self.prefills)
        assert any(node.is_alive for node in self.decodes)
