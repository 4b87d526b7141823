"""The paper's cluster of sixteen machines as simulations, and the measures that several figures take of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from traces.simulator.many import Run
from traces.simulator.profiles import LLAMA3_70B_8XA800
from traces.simulator.results import End, SimulationResult
from traces.simulator.spec import ClusterSpec, CoupledSpec

NUM_MACHINES = 16
TTFT_SLO_S = 30.0  # FAST'25, §5.2
NUM_RANKS = 1000  # of popular blocks, whose replicas figure 11 counts

MOONCAKE = ClusterSpec(
    model=LLAMA3_70B_8XA800,
    num_prefill=8,
    num_decode=8,
    policy="global-cache-aware",
    admission="none",  # rejections would flatter the latencies of the others
    num_ranks=NUM_RANKS,
)
DEARER = 3.65
"""What a sequence and its context would have to cost in a batch for figure 15's 86 % at 11P5D, in times of what follows
from the published decode times, which are those of single requests."""

_DECODE = LLAMA3_70B_8XA800.decode
DEAR_DECODING = replace(
    LLAMA3_70B_8XA800, decode=replace(_DECODE, c1=_DECODE.c1 * DEARER, c2=_DECODE.c2 * DEARER)
)

VLLM = CoupledSpec(model=LLAMA3_70B_8XA800, num_instances=NUM_MACHINES)
VLLM_CACHING = replace(VLLM, prefix_caching=True)
VLLM_CHUNKED = replace(VLLM, chunked_prefill=True)


def pooled(speedup: float = 1.0, **changes: Any) -> Run:
    """8 prefill and 8 decode machines with one pool, or with these fields of the spec changed."""
    return Run(spec=replace(MOONCAKE, **changes), speedup=speedup)


def mean_ttft_s(result: SimulationResult) -> float:
    return _mean([each.ttft_s for each in result.outcomes if each.ttft_s is not None])


def mean_device_s(result: SimulationResult) -> float:
    """Device time of a prompt."""
    return result.counters["device_s"] / len(result.outcomes)


def rejected(result: SimulationResult) -> float:
    """Share of all requests."""
    return sum(each.end is End.REJECTED for each in result.outcomes) / len(result.outcomes)


def hit_ratio(result: SimulationResult) -> float:
    """Share of prompt tokens that were not computed."""
    cached = sum(each.cached_tokens for each in result.outcomes)
    return cached / sum(each.input_length for each in result.outcomes)


def effective(result: SimulationResult, tbt_slo_s: float, ttft_slo_s: float = TTFT_SLO_S) -> float:
    """Share of all requests that completed within both limits."""
    good = sum(
        each.is_effective(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s) for each in result.outcomes
    )
    return good / len(result.outcomes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
