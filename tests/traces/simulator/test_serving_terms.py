"""What serving adds to the formulae: overheads, steps of several prompts, machines that share a host's processors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.profile import PrefillProfile
from tests.thoroughness import examples
from tests.traces.simulator.small import BLOCK, MODEL, request, run_checked, spec
from traces.simulator.arrivals import by_turns
from traces.simulator.host import Host
from traces.simulator.prefill import ChunkBegun, Computed, PrefillMachine, Prompt
from traces.simulator.results import End
from traces.simulator.run import simulate
from traces.simulator.spec import Crowding, Fault, Overheads

NEAR = pytest.approx


def test_each_overhead_is_spent_once_and_where_it_belongs() -> None:
    """A prompt of 2 s: the request's and the landing's come before its first token, the handoff's before its second."""
    overheads = Overheads(request_s=0.25, landing_s=0.125, handoff_s=0.5)
    (one,) = simulate(
        spec(model=replace(MODEL, overheads=overheads)), [request(3.0, 200, 3)]
    ).outcomes
    assert one.ttft_s == NEAR(2.375)
    assert one.mean_gap_s == NEAR((0.55 + 0.05) / 2, abs=1e-6)
    assert one.finished_s == NEAR(2.375 + 0.6, abs=1e-6)


def test_the_way_back_is_a_part_of_the_requests_and_longer_beside_the_next_prompt() -> None:
    """Prompts of 1 s: 0.125 s to the machine and as much back; the first one's token is another 0.25 s late. A second
    token comes half a second and a step after the first, as clients see it."""
    overheads = Overheads(request_s=0.25, back_s=0.125, late_back_s=0.25, handoff_s=0.5)
    records = [request(0.0, 100, 2, base=50 * n) for n in range(2)]
    first, second = simulate(spec(model=replace(MODEL, overheads=overheads)), records).outcomes
    assert first.ttft_s == NEAR(0.125 + 1.0 + 0.375)
    assert second.ttft_s == NEAR(0.125 + 2.0 + 0.125)
    assert second.mean_gap_s == NEAR(0.55, abs=1e-6)


def test_one_token_alone_ends_when_it_comes_to_its_client() -> None:
    overheads = Overheads(request_s=0.25, back_s=0.125)
    (one,) = simulate(
        spec(model=replace(MODEL, overheads=overheads)), [request(0.0, 100, 1)]
    ).outcomes
    assert (one.ttft_s, one.finished_s) == (NEAR(1.25), NEAR(1.25))


def test_a_gateway_takes_requests_of_one_moment_by_turns() -> None:
    """Prompts of 1 s on three machines: 0.25 s of way each, of which the gateway works for 0.125, for three 0.375."""
    model = replace(MODEL, overheads=Overheads(request_s=0.25, gateway_s=0.125))
    records = [request(1.0, 100, 1, base=50 * n) for n in range(3)]
    outcomes = simulate(spec(model=model, num_prefill=3), records).outcomes
    assert [each.ttft_s for each in outcomes] == [NEAR(1.5)] * 3


def test_who_comes_while_another_is_worked_at_gets_every_other_turn() -> None:
    """1 s of work each. The first is alone for 0.5 s and shares the rest; the second then has half of its work left;
    the third comes when all is done."""
    assert list(by_turns([0.0, 0.5, 4.0], 1.0)) == NEAR([1.5, 2.0, 5.0])
    assert list(by_turns([0.0, 0.5, 4.0], 0.0)) == [0.0, 0.5, 4.0]


@given(st.lists(st.floats(0.0, 20.0), max_size=20), st.floats(0.01, 3.0))
def test_turns_lose_no_work_and_keep_the_order(instants: list[float], work_s: float) -> None:
    instants.sort()
    done = list(by_turns(instants, work_s))
    assert len(done) == len(instants)
    assert done == sorted(done)
    free_at = 0.0  # one after the other, all work ends when it ends by turns
    for at, done_at in zip(instants, done, strict=True):
        free_at = max(at, free_at) + work_s
        assert at + work_s <= done_at + 1e-6
        assert free_at <= done_at + 1e-6
    assert not done or done[-1] == NEAR(free_at)


def test_a_prompt_right_after_another_is_delayed_by_its_handoff() -> None:
    """1 s of computing each; the third comes when the machine is idle again."""
    model = replace(MODEL, overheads=Overheads(turnover_s=0.125))
    records = [request(at, 100, 2, base=50 * n) for n, at in enumerate((0.0, 0.0, 5.0))]
    outcomes = simulate(spec(model=model), records).outcomes
    assert [each.ttft_s for each in outcomes] == [NEAR(1.0), NEAR(2.125), NEAR(1.0)]
    assert [each.prefill_s for each in outcomes] == [NEAR(1.0), NEAR(1.125), NEAR(1.0)]


def test_overheads_are_larger_beside_machines_at_work() -> None:
    """The first request decodes when the second one comes: its way and landing take twice and thrice as long; 1 s of
    computing."""
    model = replace(
        MODEL,
        overheads=Overheads(request_s=0.25, landing_s=0.125),
        crowding=Crowding(prefill=(1.0,), request=(1.0, 2.0), landing=(1.0, 3.0)),
    )
    first, second = simulate(
        spec(model=model), [request(0.0, 100, 200), request(3.0, 100, 2, base=50)]
    ).outcomes
    assert first.ttft_s == NEAR(0.25 + 0.125 + 1.0)
    assert second.ttft_s == NEAR(0.5 + 0.375 + 1.0)


def test_a_handoff_takes_longer_while_its_machine_goes_on_with_the_next_prompt() -> None:
    """Four times 250 ms, then as long as alone; steps of 50 ms."""
    crowding = Crowding(prefill=(1.0,), handoff=(1.0, 4.0))
    model = replace(MODEL, overheads=Overheads(handoff_s=0.25), crowding=crowding)
    first, second = simulate(
        spec(model=model), [request(0.0, 100, 2), request(0.0, 100, 2, base=50)]
    ).outcomes
    assert first.mean_gap_s == NEAR(1.0 + 0.05)
    assert second.mean_gap_s == NEAR(0.25 + 0.05)


def test_a_landing_is_asked_for_while_an_earlier_prompt_computes() -> None:
    """So its overhead delays only the first of two."""
    model = replace(MODEL, overheads=Overheads(landing_s=0.5))
    first, second = simulate(
        spec(model=model), [request(0.0, 200, 2), request(0.0, 100, 2, base=50)]
    ).outcomes
    assert (first.ttft_s, second.ttft_s) == (NEAR(2.5), NEAR(3.5))


def prompts_of(*lengths: int) -> list[Prompt]:
    return [
        Prompt(request_id=f"r{i}", rank=(0, i), num_tokens=length, submitted_at=0.0)
        for i, length in enumerate(lengths)
    ]


def test_a_mixed_chunk_takes_the_whole_next_prompt_and_both_wait_for_its_end() -> None:
    """Chunks of 100: a first one alone, then the rest of `a` (50 tokens) and all of `b`; the constant counts once."""
    profile = PrefillProfile(c0=1.0, c1=0.01, c2=0.0)
    machine = PrefillMachine(profile, chunk_tokens=100, mixes_prompts=True)
    for prompt in prompts_of(150, 50, 60):
        machine.submit(prompt, 0.0)
    for name in ("r0", "r1", "r2"):
        machine.prefix_loaded(name, 0, 0.0)
        machine.landing_granted(name, 0.0)
    outcomes = machine.advance(2.0)
    assert [(o.prompt.request_id, o.first, o.end, o.ends_at) for o in begun(outcomes)] == [
        ("r0", 100, 150, NEAR(4.0)),
        ("r1", 0, 50, NEAR(4.0)),
    ]
    outcomes = machine.advance(4.0)
    done = [outcome.prompt for outcome in outcomes if isinstance(outcome, Computed)]
    assert [(p.request_id, p.compute_s) for p in done] == [("r0", NEAR(3.0)), ("r1", NEAR(1.0))]
    assert [(o.first, o.end, o.ends_at) for o in begun(outcomes)] == [(0, 60, NEAR(5.6))]
    machine.validate()


def begun(outcomes: list[object]) -> list[ChunkBegun]:
    return [outcome for outcome in outcomes if isinstance(outcome, ChunkBegun)]


@settings(max_examples=examples(20), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    chunk=st.integers(1, 200),
)
def test_mixing_computes_the_same_tokens_in_no_more_time(lengths: list[int], chunk: int) -> None:
    """Every token once; with a constant per chunk, full chunks are never slower in the end."""
    ends = {}
    for mixes in (False, True):
        machine = PrefillMachine(
            PrefillProfile(c0=1.0, c1=1.0, c2=0.0), chunk_tokens=chunk, mixes_prompts=mixes
        )
        computed = dict.fromkeys((f"r{i}" for i in range(len(lengths))), 0)
        pending = [o for p in prompts_of(*lengths) for o in machine.submit(p, 0.0)]
        now = 0.0
        while pending or machine.wake_at is not None:
            for outcome in pending:
                if isinstance(outcome, ChunkBegun):
                    assert outcome.first == computed[outcome.prompt.request_id]
                    computed[outcome.prompt.request_id] = outcome.end
            names = [o.prompt.request_id for o in pending if type(o).__name__ == "Prepare"]
            pending = []
            for name in names:
                pending += machine.landing_granted(name, now)
                pending += machine.prefix_loaded(name, 0, now)
            if not pending and machine.wake_at is not None:
                now = machine.wake_at
                pending += machine.advance(now)
            machine.validate()
        assert list(computed.values()) == lengths
        ends[mixes] = now
    assert ends[True] <= ends[False] + 1e-9


def test_a_chunk_that_begins_beside_a_computing_machine_takes_longer() -> None:
    """The first request decodes from 1 s on; the second one's prompt of 1 s begins then and takes 1.5 s."""
    model = replace(MODEL, crowding=Crowding(prefill=(1.0, 1.5)))
    first, second = simulate(
        spec(model=model), [request(0.0, 100, 100), request(1.5, 100, 2, base=50)]
    ).outcomes
    assert (first.prefill_s, second.prefill_s) == (NEAR(1.0), NEAR(1.5))
    assert second.ttft_s == NEAR(1.5)


def test_decode_steps_take_longer_while_a_prompt_is_computed_and_no_longer() -> None:
    """50 ms alone, 100 ms for the ten steps that begin while the prompt of 1 s is computed."""
    model = replace(MODEL, crowding=Crowding(decode=(1.0, 2.0)))
    records = [request(0.0, 100, 101), request(2.02, 100, 1, base=50)]
    _, journeys = run_checked(spec(model=model), records)
    assert journeys[0].gaps_s == NEAR([0.05] * 21 + [0.1] * 10 + [0.05] * 69, abs=1e-6)


def test_clients_get_tokens_bunched_as_measured_and_the_last_one_when_it_is_due() -> None:
    """Tokens in pairs: half of the gaps nothing, the others twice a step; alone they come one by one."""
    crowding = Crowding(decode=(1.0, 1.0), gaps=((1.0,), (0.0, 2.0)))
    records = [request(0.0, 100, 101), request(2.02, 100, 1, base=50)]
    _, journeys = run_checked(spec(model=replace(MODEL, crowding=crowding)), records)
    gaps_s = journeys[0].gaps_s
    assert sum(gaps_s) == NEAR(100 * 0.05, abs=1e-5)
    assert {round(gap, 2) for gap in gaps_s[:20] + gaps_s[-50:]} == {0.05}
    assert sum(gap == 0.0 for gap in gaps_s) == NEAR(10, abs=1)


def test_without_figures_machines_have_hosts_of_their_own() -> None:
    host = Host(Crowding(), Overheads())
    host.note("a", True, decodes=False)
    assert (host.prefill_slowdown("b")(), host.decode_slowdown("b")(3).factor) == (1.0, 1.0)
    assert not host.is_shared


def test_company_costs_a_larger_batch_what_was_measured_of_one() -> None:
    host = Host(Crowding(decode=(1.0, 1.5), decode_batch=(1.0, 3.0)), Overheads())
    host.note("a", True, decodes=False)
    factors = [host.decode_slowdown("b")(num_seqs).factor for num_seqs in (1, 2, 4, 40)]
    assert factors == [NEAR(1.5), NEAR(2.0), NEAR(3.0), NEAR(3.0)]


def test_a_machine_is_not_in_its_own_way_and_the_last_factor_holds_for_more() -> None:
    host = Host(Crowding(prefill=(1.0, 1.2, 1.7)), Overheads())
    for name in "abcd":
        assert host.note(name, True, decodes=name == "d")
        assert not host.note(name, True, decodes=name == "d")
    assert host.prefill_slowdown("a")() == 1.7
    host.note("b", False, decodes=False)
    host.note("c", False, decodes=False)
    assert (host.prefill_slowdown("a")(), host.prefill_slowdown("b")()) == (1.2, 1.7)


def test_company_that_decodes_is_other_company_than_prefill_machines() -> None:
    crowding = Crowding(
        prefill=(1.0, 1.5, 2.0),
        prefill_beside_prefills=(1.0, 1.1),
        landing=(1.0, 4.0),
        landing_beside_prefills=(1.0, 1.3),
    )
    host = Host(crowding, Overheads(landing_s=0.01))
    host.note("prefill-0", True, decodes=False)
    host.note("prefill-1", True, decodes=False)
    assert host.prefill_slowdown("prefill-0")() == 1.1
    assert host.overheads_beside("prefill-0").landing_s == NEAR(0.013)
    host.note("decode-0", True, decodes=True)
    assert host.prefill_slowdown("prefill-0")() == 2.0
    assert host.overheads_beside("prefill-0").landing_s == NEAR(0.04)
    host.note("prefill-1", False, decodes=False)
    assert host.prefill_slowdown("prefill-0")() == 1.5


def test_a_handoff_takes_longer_beside_prefill_machines_its_own_too() -> None:
    host = Host(Crowding(handoff=(1.0, 3.0, 4.0)), Overheads(handoff_s=0.01))
    for name in ("prefill-0", "prefill-1", "decode-0"):
        host.note(name, True, decodes=name == "decode-0")
    assert host.handoff_s("prefill-0", goes_on=False) == NEAR(0.03)
    assert host.handoff_s("prefill-0", goes_on=True) == NEAR(0.04)
    host.note("prefill-1", False, decodes=False)
    assert host.handoff_s("prefill-0", goes_on=False) == NEAR(0.01)


@settings(max_examples=examples(12), deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 300), st.integers(1, 40)),
        min_size=1,
        max_size=12,
    ),
    factors=st.lists(st.floats(0.5, 3.0), max_size=3),
    overhead_s=st.sampled_from([0.0, 0.01, 0.7]),
    dies_at=st.none() | st.floats(0.1, 15),
)
def test_nothing_is_lost_on_a_crowded_host(
    requests: list[tuple[float, int, int]],
    factors: list[float],
    overhead_s: float,
    dies_at: float | None,
) -> None:
    """Every request ends, whatever is under way when a machine dies; all proofs hold after every event."""
    model = replace(
        MODEL,
        crowding=Crowding(prefill=tuple(factors), decode=tuple(factors)),
        overheads=Overheads(request_s=overhead_s, landing_s=overhead_s, handoff_s=overhead_s),
    )
    faults = () if dies_at is None else (Fault(instance="decode-0", at_s=dies_at, for_s=3.0),)
    records = [
        request(at, num_tokens, num_outputs, base=BLOCK * 100 * index)
        for index, (at, num_tokens, num_outputs) in enumerate(sorted(requests))
    ]
    cluster_spec = spec(
        model=model, num_prefill=2, num_decode=2, mixes_prompts=True, faults=faults, chunk_tokens=64
    )
    _, journeys = run_checked(cluster_spec, records)
    assert all(journey.end in (End.COMPLETED, End.FAILED) for journey in journeys)
    completed = [journey for journey in journeys if journey.end is End.COMPLETED]
    assert all(journey.num_generated == journey.num_outputs for journey in completed)
    assert dies_at is not None or len(completed) == len(journeys)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_prompt_that_begins_finds_all_that_was_computed_before(mixes: bool) -> None:
    """Both arrive together; the second begins when the first ends, and computes what follows ten shared blocks."""
    shared = list(range(10))
    records = [request(0.0, 150, 1, shared), request(0.0, 150, 1, shared, base=90)]
    _, journeys = run_checked(spec(mixes_prompts=mixes, chunk_tokens=100), records)
    assert [journey.cached_tokens for journey in journeys] == [0, 100]


def test_the_second_token_comes_after_the_first_however_late_that_one_is() -> None:
    """A way back of 0.5 s beside the next prompt, a handoff of 0.1 s behind it; steps of 50 ms."""
    overheads = Overheads(request_s=0.5, back_s=0.1, late_back_s=0.4, handoff_s=0.1)
    first, _ = simulate(
        spec(model=replace(MODEL, overheads=overheads)),
        [request(0.0, 100, 2), request(0.0, 100, 2, base=50)],
    ).outcomes
    assert first.mean_gap_s == NEAR(0.1 + 0.05)
