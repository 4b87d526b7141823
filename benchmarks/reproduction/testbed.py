"""The paper's cluster of sixteen machines as specs, and measures of results that several figures use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moonserve.protocol.latency import percentile
from moonserve.traces.experiments.parallel_runs import ClusterRun
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.results import End, SimulationResult
from moonserve.traces.simulator.spec import ClusterSpec, CoupledSpec, ModelProfile

NUM_MACHINES = 16
TTFT_SLO_S = 30.0  # FAST'25, §5.2
NUM_RANKS = 1000  # number of popular blocks whose replicas figure 11 counts

MOONCAKE = ClusterSpec(
    model=LLAMA3_70B_8XA800,
    num_prefill=8,
    num_decode=8,
    policy="global-cache-aware",
    admission="none",  # rejections would improve the latencies of the others
    num_ranks=NUM_RANKS,
)
VLLM = CoupledSpec(model=LLAMA3_70B_8XA800, num_instances=NUM_MACHINES)
VLLM_CACHING = replace(VLLM, prefix_caching=True)
VLLM_CHUNKED = replace(VLLM, chunked_prefill=True)


def mooncake_run(speedup: float = 1.0, **changes: Any) -> ClusterRun:
    """Returns a run of 8 prefill and 8 decode machines with one pool. `changes`: other values of spec fields."""
    return ClusterRun(spec=replace(MOONCAKE, **changes), speedup=speedup)


def costly_decoding(times: float) -> ModelProfile:
    """Returns machines on which a sequence and its context cost `times` as much in a decode step.

    The published decode times are of single requests, so the cost of a batch is a guess.
    """
    decode = LLAMA3_70B_8XA800.decode
    dear = replace(decode, c1=decode.c1 * times, c2=decode.c2 * times)
    return replace(LLAMA3_70B_8XA800, decode=dear)


def mean_ttft_s(result: SimulationResult) -> float:
    return _mean([each.ttft_s for each in result.outcomes if each.ttft_s is not None])


def p90_tbt_s(result: SimulationResult) -> float:
    """Returns the 90th percentile over requests. A request's TBT is the mean of its longest tenth of gaps."""
    return percentile([each.tbt_s for each in result.outcomes if each.tbt_s is not None], 90)


def mean_device_s(result: SimulationResult) -> float:
    """Returns the mean device time per prompt."""
    return result.counters["device_s"] / len(result.outcomes)


def rejected_share(result: SimulationResult) -> float:
    """Returns the share of rejected requests."""
    return sum(each.end is End.REJECTED for each in result.outcomes) / len(result.outcomes)


def wasted_device_s(result: SimulationResult) -> float:
    """Returns the device time of prompts that were rejected after it."""
    return sum(each.prefill_s for each in result.outcomes if each.end is End.REJECTED)


def hit_ratio(result: SimulationResult) -> float:
    """Returns the share of prompt tokens that were cached."""
    cached = sum(each.cached_tokens for each in result.outcomes)
    return cached / sum(each.input_length for each in result.outcomes)


def effective_share(result: SimulationResult, tbt_slo_s: float, ttft_slo_s: float = TTFT_SLO_S) -> float:
    """Returns the share of all requests that completed within both limits."""
    good = sum(each.is_effective(ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s) for each in result.outcomes)
    return good / len(result.outcomes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
