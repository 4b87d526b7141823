"""Tests of machines that do both kinds of work: decode machines that prefill, and machines that change roles."""

from dataclasses import replace
from typing import Any

import pytest

from moonserve.conductor.role_switching import RoleThresholds
from moonserve.protocol.step_time import CHUNK_SHARE, DecodeProfile, PrefillProfile
from moonserve.traces.simulator.cluster.conditional_disaggregation import ConditionalCluster
from moonserve.traces.simulator.cluster.request_state import RequestState
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.results import End
from moonserve.traces.simulator.spec import Fault
from tests.traces.simulator.small import MODEL, request, run_checked, spec

# 1,000 prompt tokens per second; a decode step of 20 ms leaves 30 ms for chunks, of half the objective of 0.1 s.
QUICK = replace(MODEL, prefill=PrefillProfile(c0=0.0, c1=0.001, c2=0.0), decode=DecodeProfile(c0=0.02, c1=0.0, c2=0.0))
LONG = request(0.0, 4_000, 5)


def run_conditional(*records: Any, **changes: Any) -> tuple[ConditionalCluster, list[RequestState], list[int]]:
    """Returns the cluster, its requests, and the indexes of the requests that one machine served alone."""
    cluster, states = run_checked(spec(model=QUICK, conditional=True, tbt_slo_s=0.1, **changes), records)
    return cluster, states, [j.index for j in states if j.placement is not None and j.placement.is_local_prefill]


def test_a_short_prompt_behind_a_long_one_is_read_by_the_decode_machine() -> None:
    """With 4 s of prefill queued, 60 tokens are prefilled in two steps of 50 ms on the idle decode machine."""
    cluster, states, undivided = run_conditional(LONG, request(0.1, 60, 5, base=1_000))
    assert undivided == [1]
    assert 0.1 < (states[1].first_token_at or 0.0) < 0.3
    assert cluster.counters["undivided"] == 1


def test_steps_with_chunks_take_at_most_their_share_of_the_objective() -> None:
    """While another prompt is prefilled on the same machine, no token gap of a decoding request exceeds the budget."""
    records = [request(0.0, 40, 60), request(0.3, 4_000, 5, base=1_000), request(0.4, 200, 5, base=2_000)]
    _, states, undivided = run_conditional(*records)
    assert 2 in undivided
    assert max(states[0].gaps_s[1:]) <= CHUNK_SHARE * 0.1 + 1e-9


def test_new_blocks_reach_a_store_and_are_read_from_it() -> None:
    again = request(2.0, 105, 2, hash_ids=range(1_000, 1_010), base=3_000)
    cluster, states, undivided = run_conditional(LONG, request(0.1, 100, 2, base=1_000), again)
    assert undivided == [1, 2]
    assert states[2].cached_tokens == 100
    assert cluster.counters["blocks_fetched"] == 10


def test_a_machine_that_dies_while_it_reads_loses_no_request() -> None:
    """Its request is placed again on another machine and completes."""
    faults = (Fault(instance="decode-0", at_s=0.15),)
    _, states, _ = run_conditional(LONG, request(0.1, 100, 5, base=1_000), num_decode=2, faults=faults)
    assert (states[1].end, states[1].num_generated) == (End.COMPLETED, 5)


SOON = RoleThresholds(hold_s=2.0, cool_down_s=10.0)


@pytest.mark.slow
def test_decode_machines_with_nothing_to_do_help_to_prefill() -> None:
    """With prompts for 1.8 machines and one prefill machine of four, one or two more change role. Requests in flight on
    a machine that gets no time to finish are placed again."""
    shape = spec(num_prefill=1, num_decode=3, ttft_slo_s=10.0, roles=SOON)
    records = [request(i / 1.8, 100, 2, base=1_000 * i) for i in range(108)]
    cluster, states = run_checked(replace(shape, role_drain_s=0.0), records)
    assert any(state.attempt == 2 for state in states)
    assert {state.end for state in states} == {End.COMPLETED}
    assert 1 <= cluster.counters["role_changes"] <= 2
    results = [simulate(each, records) for each in (replace(shape, roles=None), shape)]
    in_time = [sum((o.ttft_s or 99.0) <= 10.0 for o in result.outcomes) for result in results]
    assert in_time[1] > 2 * in_time[0]


@pytest.mark.slow
def test_prefill_machines_with_nothing_to_do_help_to_decode() -> None:
    """With few prompts and 40 answers that hold 880 of a decode machine's 1,000 blocks, one machine changes role."""
    records = [request(i * 0.5, 20, 400, base=1_000 * i) for i in range(240)]
    result = simulate(spec(num_prefill=3, num_decode=1, roles=SOON), records)
    assert {outcome.end for outcome in result.outcomes} == {End.COMPLETED}
    assert result.counters["role_changes"] == 1
