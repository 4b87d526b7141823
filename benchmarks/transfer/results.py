"""Computes figures from samples: medians over rounds, with the best mode of each contestant. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measure import median
from benchmarks.transfer.pair import Sample
from benchmarks.transfer.rounds import Result, describe
from benchmarks.transfer.workload import LATENCY, SIZES, throughput
from protocol.timeline import percentile

OPS = ("read", "write")


def figures(result: Result, sizes: Sequence[str]) -> dict[str, Any]:
    """Returns one contestant's part of the JSON."""
    return {
        "group": result.contestant.group,
        "absent": result.absent,
        "errors": {describe(load): error for load, error in result.errors.items()},
        "throughput": {size: {op: best for op in OPS if (best := _throughput(result, size, op))} for size in sizes},
        "latency": _latency(result),
    }


def _throughput(result: Result, size: str, op: str) -> dict[str, Any] | None:
    load = throughput(op, *SIZES[size])
    by_mode = {mode: samples for (of, mode), samples in result.samples.items() if of == load}
    if not by_mode or load in result.errors:
        return None
    mode = max(by_mode, key=lambda mode: median([sample.gb_s for sample in by_mode[mode]]))
    return {"mode": mode, **summary(by_mode[mode])}


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    speeds = [sample.gb_s for sample in samples]
    return {
        "gb_s": median(speeds),
        "gb_s_rounds": [round(speed, 3) for speed in speeds],
        "cpu_s_per_gb": median([sample.cpu_s_per_gb for sample in samples]),
    }


def _latency(result: Result) -> dict[str, Any] | None:
    if not result.latencies or LATENCY in result.errors:
        return None
    by_mode = {
        mode: {
            "p50_us": median([percentile(took, 50) * 1e6 for took in rounds]),
            "p99_us": median([percentile(took, 99) * 1e6 for took in rounds]),
        }
        for mode, rounds in result.latencies.items()
    }
    mode = min(by_mode, key=lambda mode: by_mode[mode]["p50_us"])
    return {"mode": mode, **by_mode[mode]}
