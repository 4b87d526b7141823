"""Results of a simulation. Frozen data; times are seconds of virtual time since the start of the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # by admission; reported next to the latencies, which benefit from it
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """Result of one request of the trace."""

    index: int
    arrived_s: float
    input_length: int
    output_length: int
    end: End
    reason: str = ""  # of a rejection or failure
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    queue_s: float = 0.0  # at the prefill machine
    load_s: float = 0.0  # of the prefix, as far as it delayed the prompt
    prefill_s: float = 0.0  # device time of the prompt
    predicted_ttft_s: float = 0.0
    ttft_s: float | None = None  # None = no token
    tbt_s: float | None = None  # mean of the longest tenth of the gaps; None = fewer than two tokens
    mean_gap_s: float | None = None
    finished_s: float | None = None  # since the start of the trace

    def is_effective(self, *, ttft_slo_s: float, tbt_slo_s: float) -> bool:
        """True if completed within both limits (the paper's *effective request*)."""
        return (
            self.end is End.COMPLETED
            and self.ttft_s is not None
            and self.ttft_s <= ttft_slo_s
            and (self.tbt_s is None or self.tbt_s <= tbt_slo_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSample:
    """State of one instance at one time."""

    at_s: float
    instance_id: str
    queued: int  # waiting requests
    running: int
    context_tokens: int
    predicted_queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """Number of machines that hold each of the most popular blocks, at one time."""

    at_s: float
    replicas: tuple[int, ...]  # by number of uses so far, most popular first


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The complete result of one simulation."""

    name: str  # distinguishes it from the other results on a page
    outcomes: tuple[RequestOutcome, ...]
    ttft_slo_s: float
    tbt_slo_s: float
    duration_s: float  # from the first arrival to the last end
    instances: tuple[InstanceSample, ...] = ()
    replicas: tuple[ReplicaSample, ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)  # "bytes_moved", …
    wall_s: float = 0.0  # real seconds that the simulation took
