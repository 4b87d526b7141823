"""Limits of a conductor: objectives, times and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conductor.admission import Admission
from conductor.events import Place
from protocol.step_budget import CHUNK_SHARE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the conductor; times in seconds. See `conductor.config` for their meaning and source."""

    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0
    admission: Admission = Admission.PREDICTED
    lease_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    placement_ttl_s: float = 900.0
    num_decisions: int = 4096
    decision_bytes: int = 64 * 2**20  # memory limit of decisions kept for explanation
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # default 1
    by_priority: bool = False  # queues are ordered by priority, as by the workers' --scheduling-policy
    conditional: bool = False  # decode workers prefill prompts themselves if that is sooner
    chunk_share: float = CHUNK_SHARE  # share of the TBT objective that a decode step with a chunk may take

    def of(self, place: Place) -> tuple[float, float]:
        """Returns the TTFT and TBT objectives of a request."""
        return (
            self.ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s,
            self.tbt_slo_s if place.tbt_slo_s is None else place.tbt_slo_s,
        )
