"""`policies.bounds`: no simulated policy beats a bound, and bounds equal optima counted by hand."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.conductor.policies.bounds import lowest_mean_ttft_s, most_in_time
from moonserve.protocol.step_time import PrefillProfile
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.spec import ClusterSpec
from tests.thoroughness import examples
from tests.traces.simulator.small import MODEL, request, spec

CURVED = replace(MODEL, prefill=PrefillProfile(c0=0.05, c1=0.001, c2=5e-5))
SPECS = st.builds(
    spec,
    model=st.sampled_from([MODEL, CURVED]),
    policy=st.sampled_from(["moonserve", "global-cache-aware"]),
    admission=st.sampled_from(["none", "predicted"]),
    num_prefill=st.integers(1, 3),
    mixes_prompts=st.booleans(),
    ttft_slo_s=st.just(2.0),
    chunk_tokens=st.just(64),
)
# Tenths of a second after the prompt before, tokens, blocks shared with an earlier prompt, number of that prompt.
PROMPTS = st.tuples(st.integers(0, 20), st.integers(1, 300), st.integers(0, 30), st.integers(0, 20))


@settings(max_examples=examples(500), deadline=None)
@given(SPECS, st.lists(PROMPTS, min_size=1, max_size=20))
def test_no_policy_beats_a_bound(spec: ClusterSpec, prompts: list[tuple[int, int, int, int]]) -> None:
    records: list[TraceRecord] = []
    for number, (pause, num_tokens, num_shared, other) in enumerate(prompts):
        at = records[-1].arrived_s + pause / 10 if records else 0.0
        shared = records[other % number].hash_ids[:num_shared] if records else ()
        records.append(request(at, num_tokens, 2, shared, base=1000 * number))
    outcomes = simulate(spec, records).outcomes
    assert sum(each.is_effective(ttft_slo_s=2.0, tbt_slo_s=0.1) for each in outcomes) <= most_in_time(records, spec)
    if spec.admission == "none":
        assert np.mean([each.ttft_s for each in outcomes]) >= lowest_mean_ttft_s(records, spec) - 1e-6


def test_bounds_equal_optima_counted_by_hand() -> None:
    """Each of seven prompts takes 1 s. `common` ones share 0.9 s of it."""
    at_once = [request(0.0, 100, 1, base=100 * number) for number in range(1, 8)]
    apart = [replace(record, arrived_s=5.0 * number) for number, record in enumerate(at_once)]
    common = [request(0.0, 100, 1, range(9), base=100 * number) for number in range(1, 8)]
    assert most_in_time(apart, spec(ttft_slo_s=1.0)) == len(apart)
    assert np.isclose(lowest_mean_ttft_s(apart, spec(num_prefill=2)), 1.0)
    assert most_in_time(at_once, spec(ttft_slo_s=3.0, num_prefill=2)) == 6
    assert most_in_time(at_once, spec(ttft_slo_s=0.9, num_prefill=20)) == 0
    assert most_in_time(common, spec(ttft_slo_s=1.6)) == len(common)
    assert np.isclose(lowest_mean_ttft_s(at_once, spec()), 4.0)
    # 4 s for the prefix of 3.5 s and two followers of 0.1 s, or for four others: a rejected request leaves no prefix.
    first = request(0.0, 350, 1)
    followers = [request(0.0, 360, 1, first.hash_ids, base=1000 * number) for number in (1, 2)]
    assert most_in_time([first, *followers, *at_once], spec(ttft_slo_s=4.0)) == 4
