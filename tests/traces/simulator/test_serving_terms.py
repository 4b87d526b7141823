"""Tests of what serving adds to the formulae: overheads, turns of a gateway, and machines that share a host."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.traces.format import TraceRecord
from moonserve.traces.simulator.cluster.gateway import processor_sharing
from moonserve.traces.simulator.cluster.run import simulate
from moonserve.traces.simulator.shared_host import SharedHost
from moonserve.traces.simulator.spec import Crowding, Overheads
from tests.traces.simulator.small import MODEL, request, run_checked, spec

NEAR = pytest.approx


def both() -> list[TraceRecord]:
    """Returns two prompts of 1 s that arrive at once."""
    return [request(0.0, 100, 2, base=50 * n) for n in range(2)]


class Case(NamedTuple):
    """Expected TTFT of each request, and mean gap by number of request."""

    ttfts: list[float]
    gaps: dict[int, float]
    records: list[TraceRecord] = both()
    overheads: Overheads = Overheads()
    crowding: Crowding = Crowding()


CASES = {
    "each is spent once and where it belongs: a prompt of 2 s, alone": Case(
        [2.375], {0: 0.3}, [request(3.0, 200, 3)], Overheads(request_s=0.25, landing_s=0.125, handoff_s=0.5)
    ),
    "the way back is a part of the request's and longer beside the next prompt": Case(
        [0.125 + 1.0 + 0.375, 0.125 + 2.0 + 0.125],
        {1: 0.55},
        overheads=Overheads(request_s=0.25, back_s=0.125, late_back_s=0.25, handoff_s=0.5),
    ),
    "the second token comes after the first, however late that one is": Case(
        [1.9, 2.5], {0: 0.15, 1: 0.15}, overheads=Overheads(request_s=0.5, back_s=0.1, late_back_s=0.4, handoff_s=0.1)
    ),
    "a prompt right after another is delayed by its handoff, one that comes later is not": Case(
        [1.0, 2.125, 1.0], {}, [*both(), request(5.0, 100, 2, base=100)], Overheads(turnover_s=0.125)
    ),
    "a landing is asked for while an earlier prompt computes": Case([1.5, 2.5], {}, overheads=Overheads(landing_s=0.5)),
    "way and landing take longer beside a machine that decodes": Case(
        [0.25 + 0.125 + 1.0, 0.5 + 0.375 + 1.0],
        {},
        [request(0.0, 100, 200), request(3.0, 100, 2, base=50)],
        Overheads(request_s=0.25, landing_s=0.125),
        Crowding(prefill=(1.0,), request=(1.0, 2.0), landing=(1.0, 3.0)),
    ),
    "a handoff takes longer while its machine goes on with the next prompt": Case(
        [1.0, 2.0],
        {0: 1.0 + 0.05, 1: 0.25 + 0.05},
        overheads=Overheads(handoff_s=0.25),
        crowding=Crowding(prefill=(1.0,), handoff=(1.0, 4.0)),
    ),
    "an answer of one token ends when it comes to its client": Case(
        [1.25], {}, [request(0.0, 100, 1)], Overheads(request_s=0.25, back_s=0.125)
    ),
    "a gateway takes requests of one moment by turns: 0.125 s of the way of each, three times for each": Case(
        [1.5, 2.5, 3.5],
        {},
        [request(1.0, 100, 1, base=50 * n) for n in range(3)],
        Overheads(request_s=0.25, gateway_s=0.125),
    ),
    "a chunk that begins beside a computing machine takes longer": Case(
        [1.0, 1.5], {}, [request(0.0, 100, 100), request(1.5, 100, 2, base=50)], crowding=Crowding(prefill=(1.0, 1.5))
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_overheads_depend_on_simultaneous_work(case: Case) -> None:
    """Times equal those calculated by hand: 100 tokens take 1 s to compute, a decode step takes 50 ms."""
    model = replace(MODEL, overheads=case.overheads, crowding=case.crowding)
    outcomes = simulate(spec(model=model), case.records).outcomes
    assert [each.ttft_s for each in outcomes] == NEAR(case.ttfts)
    assert {number: outcomes[number].mean_gap_s for number in case.gaps} == NEAR(case.gaps, abs=1e-6)
    for each in outcomes:
        decode_s = (each.mean_gap_s or 0.0) * (each.output_length - 1)
        assert each.finished_s == NEAR(each.arrived_s + each.ttft_s + decode_s)


def test_a_request_that_arrives_during_anothers_work_gets_every_other_turn() -> None:
    """With 1 s of work each, the first is alone for 0.5 s and shares the rest. The second then has half of its work
    left, and the third arrives when both are done."""
    assert list(processor_sharing([0.0, 0.5, 4.0], 1.0)) == NEAR([1.5, 2.0, 5.0])
    assert list(processor_sharing([0.0, 0.5, 4.0], 0.0)) == [0.0, 0.5, 4.0]


@given(st.lists(st.floats(0.0, 20.0), max_size=20), st.floats(0.01, 3.0))
def test_turns_lose_no_work_and_keep_the_order(instants: list[float], work_s: float) -> None:
    instants.sort()
    done = list(processor_sharing(instants, work_s))
    assert len(done) == len(instants)
    assert done == sorted(done)
    free_at = 0.0  # sequential work ends at the same time as work by turns
    for at, done_at in zip(instants, done, strict=True):
        free_at = max(at, free_at) + work_s
        assert at + work_s <= done_at + 1e-6
        assert free_at <= done_at + 1e-6
    assert not done or done[-1] == NEAR(free_at)


def gaps_beside_a_prompt(**crowding: Any) -> list[float]:
    """Returns the gaps of 101 tokens, during which another machine computes a prompt of 1 s."""
    records = [request(0.0, 100, 101), request(2.02, 100, 1, base=50)]
    _, states = run_checked(spec(model=replace(MODEL, crowding=Crowding(**crowding))), records)
    return states[0].gaps_s


def test_decode_steps_take_longer_while_a_prompt_is_computed_and_no_longer() -> None:
    """Steps take 50 ms alone, and 100 ms for the ten that begin while the prompt is computed."""
    gaps_s = gaps_beside_a_prompt(decode=(1.0, 2.0))
    assert gaps_s == NEAR([0.05] * 21 + [0.1] * 10 + [0.05] * 69, abs=1e-6)


def test_clients_get_tokens_bunched_as_measured_and_the_last_one_when_it_is_due() -> None:
    """While the prompt is computed, tokens arrive in pairs: half of the gaps are 0. Otherwise they arrive singly."""
    gaps_s = gaps_beside_a_prompt(decode=(1.0, 1.0), gaps=((1.0,), (0.0, 2.0)))
    assert sum(gaps_s) == NEAR(100 * 0.05, abs=1e-5)
    assert {round(gap, 2) for gap in gaps_s[:20] + gaps_s[-50:]} == {0.05}
    assert sum(gap == 0.0 for gap in gaps_s) == NEAR(10, abs=1)


def test_simultaneous_work_costs_what_was_measured() -> None:
    """A machine does not slow itself. The last factor holds for more machines. Decode machines, larger batches and
    handoffs have factors of their own; a handoff counts its own machine too if that goes on computing."""
    crowding = Crowding(
        prefill=(1.0, 1.5, 2.0),
        prefill_beside_prefills=(1.0, 1.1),
        decode=(1.0, 1.5),
        decode_batch=(1.0, 3.0),
        landing=(1.0, 4.0),
        landing_beside_prefills=(1.0, 1.3),
        handoff=(1.0, 3.0, 4.0),
    )
    host = SharedHost(crowding, Overheads(landing_s=0.01, handoff_s=0.01))
    steps = {
        # machine that begins or ends: chunk factor of p0, landing, handoff, handoff while p0 goes on
        ("p0", True): (1.0, 0.01, 0.01, 0.03),
        ("p1", True): (1.1, 0.013, 0.03, 0.04),
        ("d0", True): (2.0, 0.04, 0.03, 0.04),
        ("p1", False): (1.5, 0.04, 0.01, 0.03),
    }
    for (name, computes), expected in steps.items():
        assert host.set_computing(name, computes, decodes=name == "d0")
        assert not host.set_computing(name, computes, decodes=name == "d0")
        assert (
            host.prefill_slowdown("p0"),
            host.overheads_now("p0").landing_s,
            host.handoff_s("p0", goes_on=False),
            host.handoff_s("p0", goes_on=True),
        ) == NEAR(expected)
    factors = [host.decode_slowdown("d0", num_seqs).factor for num_seqs in (1, 2, 4, 40)]
    assert factors == NEAR([1.5, 2.0, 3.0, 3.0])
    assert not SharedHost(Crowding(), Overheads()).is_shared


@pytest.mark.parametrize("mixes", [False, True])
def test_a_prompt_that_begins_finds_all_that_was_computed_before(mixes: bool) -> None:
    """The second of two prompts that arrive at once starts after the first and reuses the ten shared blocks."""
    shared = list(range(10))
    records = [request(0.0, 150, 1, shared), request(0.0, 150, 1, shared, base=90)]
    _, states = run_checked(spec(mixes_prompts=mixes, chunk_tokens=100), records)
    assert [state.cached_tokens for state in states] == [0, 100]
