"""A cluster whose machines change between prefill and decode if the conductor decides so, as live workers do.

See docs/role-switching.md. Each machine is two nodes, one per role, of which exactly one is alive. A change drains one
and starts the other. Requests that have not ended by then are placed again. A machine's part of the pool exists only
during its prefill role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from conductor.events import Deregister, RoleChangeDue, Tick
from protocol.ids import InstanceId
from traces.simulator.clock import Timed
from traces.simulator.cluster import Cluster
from traces.simulator.events import Beat, Consider, Event, Sample
from traces.simulator.journey import Journey
from traces.simulator.machines import Node, PrefillNode
from traces.simulator.spec import ClusterSpec


class SwitchingCluster(Cluster):
    """A cluster that switches roles. `spec.num_prefill` and `num_decode` are the initial numbers."""

    def __init__(self, spec: ClusterSpec, journeys: Sequence[Journey]) -> None:
        """Raises ConfigError for an invalid spec."""
        spec.check()
        both = spec.num_prefill + spec.num_decode
        super().__init__(replace(spec, num_prefill=both, num_decode=both), journeys)
        self.spec = spec
        self._twins: dict[str, Node] = {}
        self._leaving: dict[str, float] = {}  # draining nodes by name → latest time of the change
        self._changes = 0
        for index, (prefill, decode) in enumerate(zip(self.prefills, self.decodes, strict=True)):
            self._twins |= {prefill.name: decode, decode.name: prefill}
            later: Node = decode if index < spec.num_prefill else prefill
            later.is_alive = False

    def begin(self) -> Iterator[Timed[Event]]:
        yield from super().begin()
        yield Timed(0.0, Consider())

    def _happens(self, event: Event, now: float) -> None:
        if not isinstance(event, Consider):
            super()._happens(event, now)
            return
        self._consider(now)
        if self.gateway.num_open:
            self._later(now + self.spec.heartbeat_interval_s / 2, Consider())

    def _consider(self, now: float) -> None:
        for action in self.conductor.handle(Tick(), now):
            if isinstance(action, RoleChangeDue):
                self._drain(self._nodes[action.endpoint.instance_id], now)
        for name, until in list(self._leaving.items()):
            if now >= until or not self._has_work(self._nodes[name]):
                self._change(self._nodes[name], now)

    def _drain(self, node: Node, now: float) -> None:
        node.is_draining = True
        self._leaving[node.name] = now + self.spec.role_drain_s
        self.membership.beat(node, now)
        self._later(node.beat_at, Beat(node))

    def _has_work(self, node: Node) -> bool:
        return any(self._is_hit(journey, node) for journey in self._journey_of.values())

    def _change(self, node: Node, now: float) -> None:
        del self._leaving[node.name]
        self._die(node, now)
        names = [node.name, node.store_id] if isinstance(node, PrefillNode) else [node.name]
        for name in names:
            self.conductor.handle(Deregister(instance_id=InstanceId(name), epoch=node.epoch), now)
        node.is_draining = False
        self._start(self._twins[node.name], now)
        self._changes += 1

    def _sample(self, now: float) -> None:
        prefills = [node for node in self.prefills if node.is_alive]
        self.samples.take(prefills, [node for node in self.decodes if node.is_alive], now)
        if self.gateway.num_open:
            self._later(now + self.spec.sample_interval_s, Sample())

    @property
    def counters(self) -> dict[str, float]:
        return super().counters | {"role_changes": self._changes}

    def validate(self) -> None:
        super().validate()
        for name, twin in self._twins.items():
            assert self._nodes[name].is_alive is not twin.is_alive, "a machine has one role"
        assert all(self._nodes[name].is_draining for name in self._leaving)
        assert any(node.is_alive for node in self.prefills)
        assert any(node.is_alive for node in self.decodes)
