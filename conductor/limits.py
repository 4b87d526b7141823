"""What a conductor is held to: objectives, times and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conductor.admission import Admission
from conductor.events import Place
from protocol.step_budget import CHUNK_SHARE


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times of the conductor, in seconds; see `conductor.config` for their meaning and source."""

    ttft_slo_s: float = 30.0
    tbt_slo_s: float = 1.0
    admission: Admission = Admission.PREDICTED
    lease_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    placement_ttl_s: float = 900.0
    num_decisions: int = 4096
    decision_bytes: int = 64 * 2**20  # of memory, kept for explanation at most
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # 1 where not given
    by_priority: bool = False  # as the workers' --scheduling-policy has it
    conditional: bool = False  # whether decode workers read prompts themselves where that is sooner
    chunk_share: float = CHUNK_SHARE  # of the TBT objective, what a step with a chunk takes there

    def of(self, place: Place) -> tuple[float, float]:
        """TTFT and TBT that this request must meet."""
        return (
            self.ttft_slo_s if place.ttft_slo_s is None else place.ttft_slo_s,
            self.tbt_slo_s if place.tbt_slo_s is None else place.tbt_slo_s,
        )
