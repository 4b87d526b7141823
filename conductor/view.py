"""The cluster as the conductor shows it to others. Frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conductor.cost.accuracy import Term, TermAccuracy
from conductor.events import Load
from protocol.ids import Role
from protocol.layout import KvLayout
from protocol.request import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One live instance."""

    endpoint: Endpoint
    role: Role
    load: Load
    num_blocks: int
    draining: bool
    silent_s: float  # since its last heartbeat
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
