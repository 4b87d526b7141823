"""Tests of the pitfall of Algorithm 1's longest match: all requests of the conversation trace share their first block.

Each test simulates a trace and measures the uncached tokens placed on the busiest machine, relative to the mean.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from moonserve.conductor.placement.policies.base import PrefillCandidates, Prompt, Scores, predict_unfetched
from moonserve.traces.format import TOKENS_PER_HASH, TraceRecord, read_trace
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.model_profiles import LLAMA3_70B_8XA800
from moonserve.traces.simulator.spec import ClusterSpec
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


def conversations(num_requests: int) -> list[TraceRecord]:
    """Returns records like the conversation trace's: one shared first block, growing sessions, a load of about 0.5."""
    rng = np.random.default_rng(7)
    sessions: list[tuple[int, ...]] = []
    next_id, now, records = 1, 0.0, []
    for _ in range(num_requests):
        now += float(rng.exponential(0.3))
        is_new = not sessions or rng.random() < 0.4
        begun = (0,) if is_new else sessions[rng.integers(len(sessions))]
        count = int(np.clip(rng.lognormal(2.3, 0.8), 1, 200))
        ids = begun + tuple(range(next_id, next_id + count))
        next_id += count
        sessions.append(ids[:-1])  # the partial last block is never shared
        length = len(ids) * TOKENS_PER_HASH - int(rng.integers(TOKENS_PER_HASH))
        records.append(TraceRecord(arrived_s=now, input_length=length, output_length=100, hash_ids=ids))
    return records


@pytest.mark.parametrize("policy", [*CACHE_AWARE, NAIVE])
@pytest.mark.parametrize(
    "is_real", [False, pytest.param(True, marks=[pytest.mark.trace, pytest.mark.slow, needs_trace])]
)
def test_cache_aware_policies_spread_the_work_of_a_shared_first_block(policy: str, is_real: bool) -> None:
    """The naive policy is the control: it places more than 95 % of the work on one machine."""
    records = read_trace(TRACE, 2_000 if THOROUGH else 500) if is_real else conversations(400)
    found = imbalance(policy, records)
    assert found > 0.95 * NUM_PREFILLS if policy == NAIVE else found < 1.5
