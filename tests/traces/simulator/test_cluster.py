"""Tests of a simulated cluster: times calculated by hand, conservation and determinism for any trace, and faults."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.conductor.role_switching import RoleThresholds
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.step_time import DecodeProfile
from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.event_loop import EventLoop, TimedEvent
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.results import End, results_to_json
from moonserve.traces.simulator.spec import ClusterSpec, Crowding, Fault, Overheads
from tests.thoroughness import examples
from tests.traces.simulator.small import BLOCK, MODEL, request, run_checked, spec

NEAR = pytest.approx
SWITCHING = RoleThresholds(hold_s=0.0, cool_down_s=0.5)


class Case(NamedTuple):
    """Expected fields of the last request's outcome and of the cluster's counters, with the trace and the changes."""

    expected: dict[str, Any]
    records: list[TraceRecord]
    changes: Mapping[str, Any] = MappingProxyType({})


BY_HAND = {
    "alone it waits for its prompt; KV is carried meanwhile, so the next token is one step later": Case(
        {"ttft_s": 2.0, "queue_s": 0, "load_s": 0, "prefill_s": 2.0, "mean_gap_s": 0.05, "finished_s": 2.2},
        [request(3.0, 200, 5)],
    ),
    "a slow link delays the second token: 200 tokens of 400 bytes take 4 s, the prompt 2 s": Case(
        {"ttft_s": 2.0, "mean_gap_s": 2.05, "tbt_s": 2.05},
        [request(0.0, 200, 2)],
        {"model": replace(MODEL, nic_bytes_per_s=20_000.0)},
    ),
    "an answer of one token needs no decode machine": Case(
        {"ttft_s": 2.0, "finished_s": 2.0, "tbt_s": None, "bytes_moved": 0}, [request(0.0, 200, 1)]
    ),
    "a prefix is loaded, not computed: 19 of 20 blocks take 190 · 400 / 10,000 s to load, 0.1 s are left": Case(
        {"cached_tokens": 190, "load_s": 7.6, "prefill_s": 0.1, "ttft_s": 7.7, "blocks_read_locally": 19},
        [request(0.0, 200, 2), request(50.0, 200, 2)],
        {"model": replace(MODEL, device_bytes_per_s=10_000.0)},
    ),
    "8 chunks over 4 machines: (8 + 3) / 32 of the time of one; the prediction leaves out the filling": Case(
        {"ttft_s": 8.0 * 11 / 32, "prefill_s": 8.0, "predicted_ttft_s": 2.0},
        [request(0.0, 800, 2)],
        {"chunk_tokens": 100, "prefill_group": 4},
    ),
}


@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_times_of_the_last_request_by_hand(case: Case) -> None:
    result = simulate(spec(**case.changes), case.records)
    assert {one.end for one in result.outcomes} == {End.COMPLETED}
    found = {**asdict(result.outcomes[-1]), **result.counters}
    assert {name: found[name] for name in case.expected} == NEAR(case.expected, abs=1e-6)


@pytest.mark.parametrize("pool", ["global", "local"])
def test_a_prefix_is_fetched_when_its_holder_is_busy_unless_the_pool_is_local(pool: str) -> None:
    """If the machine that holds blocks 0 … 9 is busy, the other one fetches and keeps them; a local pool does not."""
    shared = list(range(10))
    records = [request(0.0, 105, 2, shared), request(10.0, 2000, 2, shared, 100), request(10.5, 105, 2, shared, 900)]
    cluster, states = run_checked(spec(num_prefill=2, pool=pool), records)
    first, second, third = (state.outcome(0.0) for state in states)
    assert (third.prefill == first.prefill, second.cached_tokens) == (False, 100)
    expected = 10 if pool == "global" else 0
    assert (third.cached_tokens, cluster.loads.blocks_fetched) == (10 * expected, expected)
    assert [node.store.prefix(states[0].keys) for node in cluster.prefills] == [10, 10]


@pytest.mark.parametrize(
    ("changes", "reason", "computed_s"),
    [
        ({"admission": "none"}, "", 1.0),
        ({"admission": "current"}, "tbt_slo", 0.0),
        ({"admission": "predicted"}, "tbt_slo", 0.0),
        ({"admission": "late"}, "tbt_slo_at_handoff", 1.0),
        ({"admission": "none", "double_check": True}, "tbt_slo_at_handoff", 1.0),
    ],
)
def test_decode_load_rejects_on_arrival_or_at_handoff(changes: dict[str, Any], reason: str, computed_s: float) -> None:
    """One decoding sequence meets the TBT objective, two do not. A second prompt that arrives while the first one
    decodes is rejected at the time that `admission` defines, and its blocks are freed."""
    model = replace(MODEL, decode=DecodeProfile(c0=0.0, c1=0.05, c2=0.0))
    records = [request(0.0, 100, 400), request(2.0, 100, 400, base=200)]
    cluster, states = run_checked(spec(model=model, tbt_slo_s=0.06, **changes), records)
    second = states[1].outcome(0.0)
    assert [each.end for each in states] == [End.COMPLETED, End.REJECTED if reason else End.COMPLETED]
    assert (second.reason, second.prefill_s) == (reason, NEAR(computed_s))
    assert states[1].num_generated == (computed_s if reason else 400)
    assert [node.machine.leased_blocks for node in cluster.decodes] == [0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 20}, "block-size"),
        ({"faults": (Fault(instance="prefill-9", at_s=1.0),)}, "no such machine"),
        ({"policy": "fastest"}, "policy"),
        ({"scheduling_policy": "random"}, "scheduling-policy"),
        ({"model": replace(MODEL, kv_bytes_per_token=401)}, "layers"),
        ({"roles": SWITCHING, "faults": (Fault(instance="decode-0", at_s=1.0),)}, "role-switching"),
        ({"roles": SWITCHING, "prefill_group": 2}, "role-switching"),
        ({"roles": SWITCHING, "conditional": True}, "exclude each other"),
        ({"num_decode": 0}, "--decode"),
    ],
)
def test_specs_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(spec(**changes), [request(0.0, 100, 2)])


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRecord]:
    records = []
    at = 0.0
    for number in range(draw(st.integers(1, 14))):
        at += draw(st.sampled_from([0.0, 0.01, 0.3, 2.0]))
        prefix = draw(st.sampled_from([[], list(range(5)), list(range(20)), [0, 1, 50, 51]]))
        num_tokens = draw(st.integers(1, 320))
        outputs = draw(st.integers(0, 40))
        record = request(at, num_tokens, outputs, prefix, base=1000 * (number + 1))
        tenant, priority = draw(st.sampled_from("ab")), draw(st.integers(-1, 1))
        records.append(replace(record, tenant=tenant, priority=priority))
    return records


POLICIES = ("global-cache-aware", "local-cache-aware", "least-loaded", "random", "moonserve")
FACTORS = st.lists(st.floats(0.5, 3.0), max_size=3).map(tuple)
OVERHEADS = st.sampled_from([0.0, 0.01, 0.7]).map(lambda s: Overheads(request_s=s, landing_s=s, handoff_s=s))
MODELS = st.builds(
    lambda **changes: replace(MODEL, **changes),
    device_tokens=st.sampled_from([400, 10_000]),
    dram_tokens=st.sampled_from([400, 10_000]),
    disk_tokens=st.sampled_from([0, 300]),
    max_num_seqs=st.sampled_from([2, 64]),
    nic_bytes_per_s=st.sampled_from([30_000.0, 1e9]),
    crowding=st.builds(Crowding, prefill=FACTORS, decode=FACTORS),
    overheads=OVERHEADS,
)
FAULTS = st.builds(
    Fault,
    instance=st.sampled_from(["prefill-0", "decode-0"]),
    at_s=st.floats(0.0, 12.0),
    for_s=st.none() | st.floats(0.1, 15.0),
    silent=st.booleans(),
)
COMMON = {
    "num_prefill": st.integers(1, 3),
    "num_decode": st.integers(1, 3),
    "policy": st.sampled_from(POLICIES),
    "admission": st.sampled_from(["none", "current", "predicted", "late"]),
    "double_check": st.booleans(),
    "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
    "ttft_slo_s": st.sampled_from([2.0, 30.0]),
    "chunk_tokens": st.sampled_from([50, 1000]),
    "mixes_prompts": st.booleans(),
    "pool": st.sampled_from(["global", "global", "local"]),
    "seed": st.integers(0, 3),
    "model": MODELS,
}
FAULTY = {
    "prefill_group": st.integers(1, 2),
    "conditional": st.booleans(),
    "faults": st.lists(FAULTS, max_size=2).map(tuple),
}
SWITCHED = {"roles": st.just(SWITCHING), "role_drain_s": st.sampled_from([0.0, 1.0, 30.0])}
SPECS = st.builds(spec, **COMMON, **FAULTY) | st.builds(spec, **COMMON, **SWITCHED)


@settings(deadline=None, max_examples=examples(40))
@given(spec=SPECS, records=traces())
def test_every_request_ends_once_and_nothing_leaks(spec: ClusterSpec, records: list[TraceRecord]) -> None:
    """Completed requests have all tokens, blocks and bytes are conserved, nothing is in flight at the end, and a second
    run gives the same bytes. This holds for any trace, faults and cluster (with role changes, undivided requests or
    shared hosts), validated after every event."""
    cluster, states = run_checked(spec, records)
    for state in states:
        outcome = state.outcome(0.0)
        if outcome.end is End.COMPLETED:
            assert state.num_generated == state.num_outputs == len(state.gaps_s) + 1
            assert outcome.ttft_s is not None
            assert min(state.gaps_s, default=0.0) >= -1e-9
            assert outcome.cached_tokens < outcome.input_length
            if state.attempt == 1 and spec.prefill_group == 1 and not spec.conditional:
                parts = outcome.queue_s + outcome.load_s + outcome.prefill_s
                assert outcome.ttft_s >= parts - 1e-9 or spec.mixes_prompts
    assert cluster.gateway.num_open == 0
    assert len(cluster.network) == 0
    for decode in cluster.decodes:
        assert decode.machine.free_blocks == decode.machine.num_blocks
    for prefill in cluster.prefills:
        assert prefill.machine.num_waiting + prefill.machine.num_running == 0
    if not spec.faults and spec.admission == "none" and not spec.double_check:
        failed = {state.reason for state in states if state.end is not End.COMPLETED}
        assert failed <= {"invalid_request"} or spec.roles is not None
    results = [replace(simulate(spec, records), wall_s=0.0) for _ in range(2)]
    assert results[0].outcomes == tuple(state.outcome(records[0].arrived_s) for state in states)
    assert results_to_json(results[:1]) == results_to_json(results[1:])


def test_a_request_goes_on_elsewhere_when_its_decode_machine_dies() -> None:
    """If the machine dies 1 s into the answer, after 20 tokens, the other tokens follow after a second prefill."""
    faults = (Fault(instance="decode-0", at_s=2.01),)
    records = [request(0.0, 100, 60)]
    _, (state,) = run_checked(spec(num_decode=2, faults=faults), records)
    assert state.end is End.COMPLETED
    assert (state.attempt, state.num_generated, len(state.gaps_s)) == (2, 60, 59)
    assert max(state.gaps_s) > 0.1
    assert state.outcome(0.0).ttft_s == NEAR(1.0, abs=1e-6)
    assert state.placement.decode.instance_id == "decode-1"


def test_prompts_of_a_dead_prefill_machine_are_computed_elsewhere() -> None:
    records = [request(0.0, 500, 3, base=100 * number) for number in range(4)]
    faults = (Fault(instance="prefill-0", at_s=1.0),)
    _, states = run_checked(spec(num_prefill=2, faults=faults), records)
    assert all(state.end is End.COMPLETED for state in states)
    assert sum(state.attempt == 2 for state in states) == 2
    assert {j.placement.prefill.instance_id for j in states if j.placement} == {"prefill-1"}


def test_a_request_waits_for_a_machine_that_comes_back_and_fails_when_nobody_does_in_time() -> None:
    faults = (Fault(instance="prefill-0", at_s=0.5, for_s=8.0),)
    _, (state,) = run_checked(spec(faults=faults), [request(0.0, 100, 3)])
    assert state.end is End.COMPLETED
    assert 9.5 <= (state.first_token_at or 0.0) <= 10.0
    faults = (Fault(instance="decode-0", at_s=0.5),)
    _, (state,) = run_checked(spec(faults=faults), [request(0.0, 100, 3)])
    assert (state.end, state.reason) == (End.FAILED, "no_worker")
    assert 20.0 < state.ended_at < 30.0


def test_a_silent_machine_finishes_what_it_has_and_gets_nothing_new_until_it_speaks() -> None:
    """It is removed after five silent heartbeat intervals; its blocks are known again with its first heartbeat."""
    faults = (Fault(instance="prefill-0", at_s=1.0, for_s=20.0, silent=True),)
    records = [request(float(at), 100, 2, base=0) for at in (0, 10, 15, 30)]
    _, states = run_checked(spec(num_prefill=2, faults=faults), records)
    placed = [j.placement.prefill.instance_id for j in states if j.placement]
    assert all(state.end is End.COMPLETED for state in states)
    assert placed[:3] == ["prefill-0", "prefill-1", "prefill-1"]
    assert states[1].cached_tokens == 0, "a removed store is not read"
    assert states[3].cached_tokens == 9 * BLOCK


def test_a_machine_that_was_dead_has_only_what_lay_on_its_disk() -> None:
    model = replace(MODEL, dram_tokens=200, disk_tokens=5_000)
    records = [request(float(at), 200, 2, base=at) for at in (0, 100, 200)]
    faults = (Fault(instance="prefill-0", at_s=150.0, for_s=10.0),)
    _, states = run_checked(spec(model=model, faults=faults), [*records, request(300.0, 200, 2)])
    assert all(state.end is End.COMPLETED for state in states)
    assert states[3].cached_tokens == 19 * BLOCK, "the first prompt was demoted to disk before"


def test_events_of_one_instant_come_in_the_order_in_which_they_were_returned_and_none_is_of_the_past() -> None:
    seen: list[tuple[float, str]] = []

    def handle(event: str, now: float) -> list[TimedEvent[str]]:
        seen.append((now, event))
        return [TimedEvent(2.0, "c"), TimedEvent(now, "b")] if event == "a" else []

    clock: EventLoop[str] = EventLoop()
    clock.run([TimedEvent(2.0, "last but one"), TimedEvent(1.0, "a")], handle)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "last but one"), (2.0, "c")]
    assert (clock.now, clock.num_events) == (2.0, 4)
    with pytest.raises(ValueError, match="before"):
        clock.run([TimedEvent(3.0, "a")], lambda event, now: [TimedEvent(2.5, "b")])
