"""The cluster as the conductor reports it: its instances, and the gateways that requested this view recently. Pure.

Gateways request the view once a second anyway, so they need no membership of their own; no decision depends on them.
Clients and dashboards that reach one gateway find the others here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conductor.cost.accuracy import Term, TermAccuracy
from conductor.events import Load
from protocol.ids import Role
from protocol.layout import KvLayout
from protocol.pb import conductor_pb2
from protocol.request import Endpoint

LIFETIME_S = 5.0  # gateways request the view once a second, ten times a second while there are no workers
_MOST = 1_000  # guards against bugs only: requesting the view needs the cluster token


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One live instance."""

    endpoint: Endpoint
    role: Role
    load: Load
    num_blocks: int
    draining: bool
    last_heard_s: float  # since its last heartbeat
    indexed_blocks: int
    can_switch_role: bool
    need: float  # see `WorkerLoad`; 0 for stores
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All live instances and the properties that all workers share."""

    instances: tuple[InstanceView, ...]
    layout: KvLayout | None  # None until the first worker joined
    fingerprint: str | None
    max_model_len: int
    ready: bool  # a prefill and a decode worker accept requests
    ttft_slo_s: float  # default objectives, for requests without their own
    tbt_slo_s: float
    ttft_accuracy: Mapping[Term, TermAccuracy]  # observed terms only


class SeenGateways:
    """Gateways that requested the view recently, by instance id; `now` in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, conductor_pb2.GatewayView]] = {}

    def saw(self, gateway: conductor_pb2.GatewayView, now: float) -> None:
        """Records a gateway's request; its earlier one is replaced."""
        if gateway.instance_id in self._seen or len(self._seen) < _MOST:
            self._seen[gateway.instance_id] = (now, gateway)

    def present(self, now: float) -> list[conductor_pb2.GatewayView]:
        """Returns the recent gateways in order of id, and drops silent ones."""
        self._seen = {id: seen for id, seen in self._seen.items() if now - seen[0] < LIFETIME_S}
        return [self._seen[instance_id][1] for instance_id in sorted(self._seen)]
