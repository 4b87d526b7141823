"""Decode machines that read prompts themselves: what they promise those who decode, and that nothing gets lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protocol.profile import DecodeProfile, PrefillProfile
from protocol.step_budget import CHUNK_SHARE
from tests.traces.simulator.small import MODEL, request, run_checked, spec
from traces.simulator.conditional import ConditionalCluster
from traces.simulator.journey import Journey
from traces.simulator.results import End
from traces.simulator.spec import Fault

# 1,000 prompt tokens per second; a step of 20 ms leaves 30 ms of the half of 0.1 s to chunks.
QUICK = replace(MODEL, prefill=PrefillProfile(c0=0.0, c1=0.001, c2=0.0), decode=DecodeProfile(c0=0.02, c1=0.0, c2=0.0))
LONG = request(0.0, 4_000, 5)


def run_conditional(*records: Any, **changes: Any) -> tuple[ConditionalCluster, list[Journey], list[int]]:
    """Also the numbers of the requests that one machine served alone."""
    cluster, journeys = run_checked(spec(model=QUICK, conditional=True, tbt_slo_s=0.1, **changes), records)
    assert isinstance(cluster, ConditionalCluster)
    return cluster, journeys, [j.index for j in journeys if j.placement is not None and j.placement.is_undivided]


def test_a_short_prompt_behind_a_long_one_is_read_by_the_decode_machine() -> None:
    """4 s of prefill are queued; 60 tokens take two steps of 50 ms at the decode machine, where nobody decodes yet."""
    cluster, journeys, undivided = run_conditional(LONG, request(0.1, 60, 5, base=1_000))
    assert undivided == [1]
    assert 0.1 < (journeys[1].first_token_at or 0.0) < 0.3
    assert cluster.counters["undivided"] == 1


def test_steps_with_chunks_keep_to_their_share_of_the_objective() -> None:
    """One decodes while the other's prompt is read beside it: each gap is a step, none longer than the budget."""
    records = [request(0.0, 40, 60), request(0.3, 4_000, 5, base=1_000), request(0.4, 200, 5, base=2_000)]
    _, journeys, undivided = run_conditional(*records)
    assert 2 in undivided
    assert max(journeys[0].gaps_s[1:]) <= CHUNK_SHARE * 0.1 + 1e-9


def test_new_blocks_reach_a_store_and_are_read_by_whoever_needs_them_next() -> None:
    again = request(2.0, 105, 2, hash_ids=range(1_000, 1_010), base=3_000)
    cluster, journeys, undivided = run_conditional(LONG, request(0.1, 100, 2, base=1_000), again)
    assert undivided == [1, 2]
    assert journeys[2].cached_tokens == 100
    assert cluster.counters["blocks_fetched"] == 10


def test_a_machine_that_dies_while_it_reads_loses_no_request() -> None:
    """It is placed again, elsewhere."""
    faults = (Fault(instance="decode-0", at_s=0.15),)
    _, journeys, _ = run_conditional(LONG, request(0.1, 100, 5, base=1_000), num_decode=2, faults=faults)
    assert (journeys[1].end, journeys[1].num_generated) == (End.COMPLETED, 5)
