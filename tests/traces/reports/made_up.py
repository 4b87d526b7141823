"""Results such as a simulation gives, made up; equal arguments give equal ones. They have all that a page can show."""

from __future__ import annotations

import math
import random

from traces.simulator.results import (
    End,
    InstanceSample,
    ReplicaSample,
    RequestOutcome,
    SimulationResult,
)


def outcome(index: int, **given: object) -> RequestOutcome:
    """A request that completed well within any objective, but for what is given."""
    fields: dict[str, object] = {
        "index": index, "arrived_s": float(index), "input_length": 100, "output_length": 11,
        "end": End.COMPLETED, "prefill": "prefill-0", "decode": "decode-0", "cached_tokens": 50,
        "predicted_ttft_s": 1.0, "ttft_s": 1.0, "tbt_s": 0.05, "mean_gap_s": 0.04,
        "finished_s": index + 1.4,
    }  # fmt: skip
    return RequestOutcome(**{**fields, **given})  # type: ignore[arg-type]


def rejected(index: int, reason: str = "ttft", **given: object) -> RequestOutcome:
    return outcome(
        index, end=End.REJECTED, reason=reason, ttft_s=None, tbt_s=None, mean_gap_s=None,
        finished_s=None, prefill="", decode="", **given,
    )  # fmt: skip


def result(name: str, *outcomes: RequestOutcome, **given: object) -> SimulationResult:
    fields: dict[str, object] = {"ttft_slo_s": 30.0, "tbt_slo_s": 0.1, "duration_s": 10.0}
    return SimulationResult(name=name, outcomes=outcomes, **{**fields, **given})  # type: ignore[arg-type]


def made_up(
    name: str,
    *,
    seed: int = 0,
    num_requests: int = 600,
    rate: float = 3.0,
    slowness: float = 1.0,
    num_prefill: int = 8,
    num_decode: int = 8,
    capacity_tokens: int | None = None,
    series: str = "",
) -> SimulationResult:
    """Load swings; slow ones reject. Nothing here is a claim about a real cluster."""
    draw = random.Random(f"{name} {seed}")
    outcomes, now = [], 0.0
    hit = 0.37 if capacity_tokens is None else 0.37 * (1 - math.exp(-capacity_tokens / 1e7))
    for index in range(num_requests):
        now += draw.expovariate(rate)
        outcomes.append(_drawn(draw, index, now, slowness, hit, num_prefill, num_decode))
    duration_s = now + 20
    instants = [step * duration_s / 120 for step in range(120)]
    return SimulationResult(
        name=name, outcomes=outcomes, ttft_slo_s=30.0, tbt_slo_s=0.1, duration_s=duration_s,
        instances=[
            sample
            for at_s in instants
            for sample in _loads(draw, at_s, slowness, num_prefill, num_decode)
        ],
        replicas=[_replicas(draw, at_s, at_s / duration_s, num_prefill) for at_s in instants[1:]],
        counters={"events": 40.0 * num_requests, "bytes_moved": 1.7e13, "evicted_blocks": 0.0},
        wall_s=12.5, capacity_tokens=capacity_tokens, series=series,
    )  # fmt: skip


def _swing(at_s: float) -> float:
    return 1 + 0.6 * math.sin(at_s / 40)


def _drawn(
    draw: random.Random,
    index: int,
    now: float,
    slowness: float,
    hit: float,
    prefills: int,
    decodes: int,
) -> RequestOutcome:
    length = int(draw.lognormvariate(8.9, 1.0)) + 20
    cached = int(length * min(1.0, hit * draw.uniform(0, 2)))
    prefill_s = 1.2e-4 * (length - cached) + 0.02
    queue_s = draw.expovariate(1 / (1.5 * slowness)) * _swing(now)
    predicted_s = (prefill_s + queue_s) * draw.lognormvariate(-0.1, 0.25)
    if slowness > 1 and draw.random() < 0.06 * slowness * _swing(now):
        reason = draw.choice(["ttft", "ttft", "tbt", "memory"])
        return rejected(
            index, reason, arrived_s=now, input_length=length, predicted_ttft_s=predicted_s + 30
        )
    num_outputs = int(draw.expovariate(1 / 180)) + 1
    gap_s = draw.uniform(0.025, 0.05) * slowness**0.4
    ttft_s = prefill_s + queue_s
    return outcome(
        index, arrived_s=now, input_length=length, output_length=num_outputs, cached_tokens=cached,
        prefill=f"prefill-{index % prefills}", decode=f"decode-{index % decodes}", queue_s=queue_s,
        load_s=cached * 1e-6, prefill_s=prefill_s, predicted_ttft_s=predicted_s, ttft_s=ttft_s,
        tbt_s=gap_s * draw.uniform(1, 2.5) if num_outputs > 1 else None,
        mean_gap_s=gap_s if num_outputs > 1 else None,
        finished_s=now + ttft_s + gap_s * (num_outputs - 1),
    )  # fmt: skip


def _loads(
    draw: random.Random, at_s: float, slowness: float, prefills: int, decodes: int
) -> list[InstanceSample]:
    samples = []
    for number in range(prefills):
        queue_s = max(0.0, draw.gauss(2.0, 1.0) * slowness * _swing(at_s + 9 * number))
        samples.append(
            InstanceSample(
                at_s=at_s, instance_id=f"prefill-{number}", queued=int(queue_s), running=1,
                context_tokens=0, predicted_queue_s=queue_s,
            )
        )  # fmt: skip
    for number in range(decodes):
        running = int(max(0.0, draw.gauss(20, 4) * _swing(at_s + 5 * number)))
        samples.append(
            InstanceSample(
                at_s=at_s, instance_id=f"decode-{number}", queued=0, running=running,
                context_tokens=running * 9000, predicted_queue_s=0.0,
            )
        )  # fmt: skip
    return samples


def _replicas(draw: random.Random, at_s: float, progress: float, machines: int) -> ReplicaSample:
    held = (machines * progress**0.3 * (rank + 1) ** -0.25 + draw.random() for rank in range(100))
    return ReplicaSample(
        at_s=at_s, replicas=tuple(max(1, min(machines, int(each))) for each in held)
    )
