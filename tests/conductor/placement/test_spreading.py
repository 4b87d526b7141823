"""Tests of the pitfall of Algorithm 1's longest match: all requests of the conversation trace share their first block.

Each test simulates a trace and measures the uncached tokens placed on the busiest machine, relative to the mean.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from random import Random

import numpy as np
import pytest

from moonserve.conductor.placement.policies.base import PrefillCandidates, Prompt, Scores, predict_unfetched
from moonserve.traces.format import TraceRecord, read_trace
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.spec import ClusterSpec
from moonserve.traces.workload.generator import PRESETS, requests_of
from tests.thoroughness import THOROUGH, TRACE, needs_trace

NUM_PREFILLS = 8
CACHE_AWARE = ["global-cache-aware", "local-cache-aware", "session-affinity"]
NAIVE = "tests.conductor.placement.test_spreading:LongestPrefix"


class LongestPrefix:
    """A naive policy: the instance with the longest cached prefix, the first of equals."""

    name = "longest-prefix"
    balancing_threshold: float | None = None
    by_session = False

    def weigh(self, prompt: Prompt, offers: PrefillCandidates) -> Scores:
        first_of_longest = np.arange(len(offers.prefix_blocks)) / len(offers.prefix_blocks)
        return predict_unfetched(prompt, offers).with_score(first_of_longest - offers.prefix_blocks)


def imbalance(policy: str, records: Sequence[TraceRecord]) -> float:
    spec = ClusterSpec(
        model=LLAMA3_70B_8XA800, num_prefill=NUM_PREFILLS, num_decode=NUM_PREFILLS, policy=policy, admission="none"
    )
    placed: Counter[str] = Counter()
    for outcome in simulate(spec, records).outcomes:
        placed[outcome.prefill] += outcome.input_length - outcome.cached_tokens
    return max(placed.values()) * NUM_PREFILLS / placed.total()


@pytest.mark.parametrize("policy", [*CACHE_AWARE, NAIVE])
@pytest.mark.parametrize(
    "is_real", [False, pytest.param(True, marks=[pytest.mark.trace, pytest.mark.slow, needs_trace])]
)
def test_cache_aware_policies_spread_the_work_of_a_shared_first_block(policy: str, is_real: bool) -> None:
    """The naive policy is the control: it places more than 95 % of the work on one machine."""
    made = islice(requests_of(PRESETS["conversation"], Random(7)), 400)
    records = read_trace(TRACE, 2_000 if THOROUGH else 500) if is_real else list(made)
    found = imbalance(policy, records)
    assert found > 0.95 * NUM_PREFILLS if policy == NAIVE else found < 1.5
