"""Invented simulation results with all the data that a report page can show. Equal arguments give equal results."""

import random
from typing import Any

from moonserve.traces.simulator.results import End, InstanceSample, ReplicaSample, RequestOutcome, SimulationResult


def outcome(index: int, **given: Any) -> RequestOutcome:
    """Returns a completed request that meets the objectives; `given` overrides fields."""
    fields = {
        "arrived_s": float(index),
        "input_length": 100,
        "output_length": 11,
        "end": End.COMPLETED,
        "prefill": "prefill-0",
        "decode": "decode-0",
        "cached_tokens": 50,
        "predicted_ttft_s": 1.0,
        "ttft_s": 1.0,
        "tbt_s": 0.05,
        "mean_gap_s": 0.04,
        "finished_s": index + 1.4,
    }
    return RequestOutcome(index=index, **{**fields, **given})


def rejected(index: int, reason: str = "ttft", **given: Any) -> RequestOutcome:
    never = dict.fromkeys(("ttft_s", "tbt_s", "mean_gap_s", "finished_s"))
    return outcome(index, end=End.REJECTED, reason=reason, prefill="", decode="", **never, **given)


def result(name: str, *outcomes: RequestOutcome, **given: Any) -> SimulationResult:
    fields = {"ttft_slo_s": 30.0, "tbt_slo_s": 0.1, "duration_s": 10.0}
    return SimulationResult(name=name, outcomes=outcomes, **{**fields, **given})


def sample(at_s: float, instance_id: str, queued: int, predicted: float = 0.0) -> InstanceSample:
    usual = {"running": 1, "context_tokens": 0}
    return InstanceSample(at_s=at_s, instance_id=instance_id, queued=queued, predicted_queue_s=predicted, **usual)


def made_up(name: str, *, num_requests: int = 40, rate: float = 3.0, rejects: bool = False) -> SimulationResult:
    """Returns a result with samples of both kinds of machines and of replicas. `rejects`: every fifth request is."""
    draw = random.Random(name)
    outcomes = [
        rejected(index, arrived_s=index / rate)
        if rejects and index % 5 == 0
        else outcome(index, arrived_s=index / rate, ttft_s=draw.expovariate(1), tbt_s=draw.expovariate(20))
        for index in range(num_requests)
    ]
    instances = tuple(
        sample(float(at), f"{kind}-{number}", draw.randrange(9), draw.random() * is_prefill)
        for at in range(10)
        for is_prefill, kind in enumerate(("decode", "prefill"))
        for number in range(3)
    )
    replicas = tuple(ReplicaSample(at_s=float(at), replicas=(3, 2, 1)) for at in range(10))
    sampled = {"instances": instances, "replicas": replicas, "counters": {"bytes_moved": 1.7e13}}
    return result(name, *outcomes, duration_s=num_requests / rate, **sampled)
