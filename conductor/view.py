"""The cluster as the conductor shows it to others: its instances, and the gateways that have asked lately. Pure.

Gateways ask for this view once a second anyway, so they need no membership of their own; nothing is decided by them.
Clients and dashboards that reach one gateway learn of the others from here.
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

LIFETIME_S = 5.0  # gateways ask once a second, ten times while there are no workers
_MOST = 1_000  # asking needs the cluster's token, so this is for our own bugs


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
    need: float  # workers: as `WorkerLoad` has it
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All live instances and what their workers have in common."""

    instances: tuple[InstanceView, ...]
    layout: KvLayout | None  # None until the first worker joined
    fingerprint: str | None
    max_model_len: int
    ready: bool  # a prefill and a decode worker accept requests
    ttft_slo_s: float  # what placement must meet where requests do not say
    tbt_slo_s: float
    ttft_accuracy: Mapping[Term, TermAccuracy]  # of the terms that were observed


class SeenGateways:
    """By instance id; `now` in monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, conductor_pb2.GatewayView]] = {}

    def saw(self, gateway: conductor_pb2.GatewayView, now: float) -> None:
        """It has asked; what it told before is forgotten."""
        if gateway.instance_id in self._seen or len(self._seen) < _MOST:
            self._seen[gateway.instance_id] = (now, gateway)

    def present(self, now: float) -> list[conductor_pb2.GatewayView]:
        """By id; those who are silent are forgotten."""
        self._seen = {id: seen for id, seen in self._seen.items() if now - seen[0] < LIFETIME_S}
        return [self._seen[instance_id][1] for instance_id in sorted(self._seen)]
