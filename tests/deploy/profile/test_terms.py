"""From observations to the terms of a simulation: what was put in comes out, and noise on one side of a comparison does
not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.profile.bursts import Answered, Observations, PromptRun, StepRun, steps_of
from deploy.profile.probe import steps_between
from deploy.profile.serving import calibrated
from deploy.profile.terms import terms_of
from protocol.errors import ConfigError
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.timeline import Timeline
from traces.simulator.spec import ClusterSpec, ModelProfile, Overheads

NEAR = pytest.approx
CHUNK = 512
PREFILL = PrefillProfile(c0=2e-3, c1=5e-5, c2=5e-8)
DECODE = DecodeProfile(c0=2e-3, c1=1e-4, c2=4e-7)


def prompt(
    num_tokens: int,
    num_cached: int = 0,
    num_others: int = 0,
    slow: float = 1.0,
    decodes_beside: bool | None = None,
) -> PromptRun:
    """As a worker with PREFILL computes it, chunk by chunk, between 5 ms of request, 2 of them for the way back, and 2
    of landing. Whoever has company has a decode machine's, unless told otherwise."""
    starts = range(num_cached, num_tokens, CHUNK)
    compute_s = slow * sum(PREFILL.seconds(min(s + CHUNK, num_tokens), s) for s in starts)
    return PromptRun(
        machine="prefill-0",
        num_tokens=num_tokens,
        num_cached=num_cached,
        num_others=num_others,
        decodes_beside=num_others > 0 if decodes_beside is None else decodes_beside,
        ttft_s=compute_s + 0.001 + 0.002 + 0.005,
        placed_s=0.003,
        queue_s=0.001,
        load_s=0.002,
        compute_s=compute_s,
        second_gap_s=0.009,
        step_s=0.003,
    )


def right_after(run: PromptRun, *, handoff_s: float, late_back_s: float) -> PromptRun:
    """The same prompt behind another one, and before the next."""
    return replace(
        run,
        compute_s=run.compute_s + handoff_s,
        ttft_s=run.ttft_s + handoff_s + late_back_s,
    )


def step(num_seqs: int, context: int, num_others: int = 0, slow: float = 1.0) -> StepRun:
    return StepRun(
        num_seqs=num_seqs,
        prompt_tokens=context // num_seqs,
        context_tokens=context,
        num_others=num_others,
        seconds=slow * DECODE.step_s(num_seqs, context),
    )


def observed(**changes: object) -> Observations:
    values: dict[str, object] = {
        "prompts": [prompt(n, p) for n in (16, 300, 900, 4000) for p in (0, n // 2)],
        "steps": [step(b, b * c) for b in (1, 4, 16) for c in (64, 512, 1536)],
        "beside_prompts": [prompt(1024), prompt(1024, num_others=1, slow=1.25)],
        "beside_steps": [step(4, 1500), step(4, 1600, num_others=1, slow=1.5)],
        "bursts_s": [0.001, 0.003, 0.0015],
        "in_a_row": [right_after(prompt(300), handoff_s=0.008, late_back_s=0.004)],
    }
    return Observations(**{**values, **changes})  # type: ignore[arg-type]


def test_formulae_overheads_and_crowding_come_out_as_they_went_in() -> None:
    """The constant of a prompt is its chunks': eight for 4,000 tokens."""
    terms = terms_of(observed(), CHUNK)
    prefill, decode = terms.prefill.profile, terms.decode.profile
    assert (prefill.c0, prefill.c1, prefill.c2) == NEAR((2e-3, 5e-5, 5e-8))
    assert (decode.c0, decode.c1, decode.c2) == NEAR((2e-3, 1e-4, 4e-7))
    assert terms.prefill.errors.max == NEAR(0.0, abs=1e-6)
    overheads = terms.overheads
    assert (overheads.request_s, overheads.landing_s) == (NEAR(0.005), NEAR(0.002))
    assert overheads.turnover_s == NEAR(0.008)
    assert (overheads.back_s, overheads.late_back_s) == (NEAR(0.002), NEAR(0.004))
    assert (overheads.handoff_s, overheads.gateway_s) == (NEAR(0.006), 0.0015)
    assert (terms.crowding.prefill, terms.crowding.decode) == (NEAR((1, 1.25)), NEAR((1, 1.5)))


@given(slow=st.floats(0.5, 4.0), others=st.integers(1, 3))
def test_crowding_is_told_from_a_machine_that_is_slow_at_all_times(
    slow: float, others: int
) -> None:
    """Both sides of the comparison were measured later than the formulae, when everything took `slow` times as long."""
    prompts = [prompt(1024, num_others=n, slow=slow * (1 + n / 4)) for n in range(others + 1)]
    terms = terms_of(observed(beside_prompts=prompts), CHUNK)
    assert terms.crowding.prefill == NEAR(tuple(1 + n / 4 for n in range(others + 1)))


def test_machines_that_differ_are_one_of_their_mean_and_company_is_told_apart() -> None:
    """All prompts alone went to the faster one at first, later to the one that is 1.5 times as slow."""
    fast = [prompt(n) for n in (16, 300, 900, 1024, 4000)]
    slow = [replace(prompt(1024, slow=1.5), machine="prefill-1")] * 3
    both = [prompt(1024, num_others=1, slow=2.0), prompt(1024, num_others=1)]
    both[1] = replace(both[1], machine="prefill-1", compute_s=3.0 * prompt(1024).compute_s)
    terms = terms_of(observed(prompts=fast, beside_prompts=[*slow, *both]), CHUNK)
    assert terms.prefill.profile.c1 == NEAR(1.25 * 5e-5)
    assert terms.crowding.prefill == NEAR((1.0, 2.0))


@pytest.mark.parametrize(
    ("others", "factors"),
    [
        ([prompt(1024), prompt(1024, num_others=2, slow=2.0)], (1.0,)),  # a gap ends them
        ([], ()),
        ([prompt(1024), prompt(1024, num_others=1, slow=0.8)], (1.0, 1.0)),  # company helps nobody
    ],
)
def test_factors_are_as_far_as_measured_and_never_below_one(
    others: list[PromptRun], factors: tuple[float, ...]
) -> None:
    assert terms_of(observed(beside_prompts=others), CHUNK).crowding.prefill == factors


def test_nothing_measured_is_said() -> None:
    with pytest.raises(ConfigError, match="--budget-s"):
        terms_of(observed(prompts=[prompt(64, 32)] * 4), CHUNK)


def test_the_steps_of_a_batch_are_counted_where_all_decode() -> None:
    """Two streams with steps of 10 ms, one a step ahead; prompts of 100 tokens, 3 to 7 generated: 210 on average."""
    streams = [
        Timeline(0.0, tuple(0.01 * n for n in range(12))),
        Timeline(0.0, tuple(0.01 * n + 0.01 for n in range(12))),
    ]
    (run,) = steps_between(streams, 100, 0.03, 0.07, num_others=2)
    assert (run.num_seqs, run.num_others, run.seconds) == (2, 2, NEAR(0.01))
    assert run.context_tokens == 100 + 5 + 100 + 4
    assert steps_between(streams, 100, 0.03, 0.05, num_others=0) == []


@pytest.mark.parametrize(
    ("token_at", "begin", "end", "steps_s"),
    [
        ((0.0, *[0.05] * 5, 0.1), 0.04, 0.06, []),  # all tokens in one instant
        ((0.0, *[0.05] * 5, *[0.1] * 5), 0.0, 0.1, [0.01]),  # two bunches of five steps of 10 ms
    ],
)
def test_tokens_that_reach_the_client_together_are_steps_if_time_passes(
    token_at: tuple[float, ...], begin: float, end: float, steps_s: list[float]
) -> None:
    runs = steps_between([Timeline(0.0, token_at)], 100, begin, end, num_others=1)
    assert [run.seconds for run in runs] == NEAR(steps_s)


def test_how_tokens_are_bunched_is_told_apart_from_how_long_steps_take() -> None:
    """Beside one other, tokens come in pairs: half of the gaps are nothing, the others twice a step."""
    alone = replace(step(4, 1500), gaps_s=(0.01,) * 40)
    beside = replace(step(4, 1600, num_others=1, slow=1.5), seconds=0.02, gaps_s=(0.0, 0.04) * 40)
    gaps = terms_of(observed(beside_steps=[alone, beside]), CHUNK).crowding.gaps
    assert [sum(each) / len(each) for each in gaps] == [NEAR(1.0), NEAR(1.0)]
    assert gaps[0] == NEAR((1.0,) * 40)
    assert gaps[1] == NEAR((0.0,) * 20 + (2.0,) * 20)


def test_stretches_that_come_at_once_make_most_gaps_short() -> None:
    """Of three streams with equal steps two get all tokens at once, the third waits: each is even in itself."""
    alike = step(4, 1500)
    at_once = replace(alike, seconds=1e-5, gaps_s=(1e-5,) * 20)
    waiting = replace(alike, seconds=0.03, gaps_s=(0.03,) * 20)
    (gaps,) = terms_of(observed(beside_steps=[at_once, at_once, waiting]), CHUNK).crowding.gaps
    assert gaps[len(gaps) // 2] == NEAR(1e-3, abs=1e-4)


@given(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=200).filter(lambda g: sum(g) > 1e-3))
def test_the_longest_gaps_keep_their_part_of_the_time(gaps_s: list[float]) -> None:
    """However few there are: each half of the shares has the time of that half of the gaps."""
    run = replace(step(4, 1500), gaps_s=tuple(gaps_s) * 2)
    (shares,) = terms_of(observed(beside_steps=[run]), CHUNK).crowding.gaps
    assert list(shares) == NEAR(sorted(shares))
    ordered = sorted(gaps_s * 2)
    longer_half = sum(ordered[len(gaps_s) :]) / sum(ordered)
    assert sum(shares[20:]) / sum(shares) == NEAR(longer_half)


def test_company_is_told_apart_for_one_sequence_and_for_a_batch() -> None:
    steps = [step(n, 400 * n, w, slow=1.0 + w * n / 4) for n in (1, 4) for w in (0, 1)]
    crowding = terms_of(observed(beside_steps=steps), CHUNK).crowding
    assert (crowding.decode, crowding.decode_batch) == (NEAR((1.0, 1.25)), NEAR((1.0, 2.0)))


def test_prefill_machines_as_company_are_told_apart_from_such_that_decode() -> None:
    """Of prompts in a row, what is longer than company explains is the turnover: theirs is prefill machines'."""
    runs = [
        prompt(1024),
        prompt(1024, num_others=1, slow=1.1, decodes_beside=False),
        prompt(1024, num_others=1, slow=1.5),
    ]
    row = prompt(300, num_others=1, slow=1.1, decodes_beside=False)
    row = replace(row, compute_s=row.compute_s + 0.008)
    terms = terms_of(observed(beside_prompts=runs, in_a_row=[row]), CHUNK)
    assert terms.crowding.prefill == NEAR((1.0, 1.5))
    assert terms.crowding.prefill_beside_prefills == NEAR((1.0, 1.1))
    assert terms.crowding.landing_beside_prefills == NEAR((1.0, 1.0))
    assert terms.overheads.turnover_s == NEAR(0.008)


# -- bursts


def answered(
    machine: str, computes_from: float, first_token_at: float, *, step_s: float, num_steps: int
) -> Answered:
    """A handoff of 20 ms beside the first step."""
    second = first_token_at + 0.02 + step_s
    later = (second + step_s * number for number in range(num_steps))
    return Answered(
        machine=machine,
        num_tokens=500,
        sent_at=computes_from - 0.01,
        placed_s=0.004,
        computes_from=computes_from,
        computes_until=first_token_at,
        token_at=(first_token_at, *later),
    )


def test_steps_of_a_burst_are_told_apart_by_the_machines_that_compute_during_them() -> None:
    """The first answer has ten steps of 10 ms beside another prompt, then ten of 5 ms beside nobody."""
    second = answered("prefill-0", 0.1, 0.23, step_s=0.005, num_steps=1)
    first = answered("prefill-0", 0.0, 0.1, step_s=0.01, num_steps=11)
    alone = tuple(first.token_at[-1] + 0.005 * (n + 1) for n in range(10))
    first = replace(first, token_at=first.token_at + alone)
    beside, after = sorted(steps_of([first, second]), key=lambda run: -run.num_others)
    assert (beside.num_others, after.num_others) == (1, 0)
    assert (beside.seconds, after.seconds) == (NEAR(0.01), NEAR(0.005))
    assert (beside.num_seqs, beside.prompt_tokens) == (1, 500)
    assert 500 < beside.context_tokens < after.context_tokens <= 521
    # Two streams at once, beside one machine with two prompts and another with one.
    streams = [answered(f"prefill-{n}", 0.0, 0.1, step_s=0.01, num_steps=20) for n in range(2)]
    others = [answered(f"prefill-{n % 2}", 0.1, 9.0, step_s=0.01, num_steps=1) for n in range(3)]
    runs = [run for run in steps_of([*streams, *others]) if run.num_seqs == 2]
    assert [(run.num_others, run.context_tokens > 1000) for run in runs] == [(2, True)] * 2
    assert steps_of([replace(first, token_at=(0.1, *[0.2] * 9))]) == []  # one instant tells no step


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_crowding_is_what_bursts_show_and_not_long_answers(slow: float) -> None:
    """Answers of two prompts while a third and longest one is computed; the handoff alone takes 6 ms."""
    step_s = slow * DECODE.step_s(1, 510)
    burst = [
        answered("prefill-0", 0.0, 0.1, step_s=step_s, num_steps=20),
        answered("prefill-0", 0.1, 9.0, step_s=step_s, num_steps=1),
    ]
    seen = observed(
        answered=[burst],
        beside_prompts=[prompt(1024)],
        beside_steps=[step(1, 500), step(1, 500, num_others=1, slow=7.0)],
    )
    crowding = terms_of(seen, CHUNK).crowding
    assert crowding.decode == NEAR((1.0, slow), rel=1e-2)
    assert crowding.handoff == NEAR((1.0, 0.02 / 0.006))


MODEL = ModelProfile(
    name="small",
    prefill=PREFILL,
    decode=DECODE,
    kv_bytes_per_token=1024,
    num_layers=4,
    nic_bytes_per_s=1e10,
    device_bytes_per_s=1e10,
    disk_bytes_per_s=1e9,
    device_tokens=100_000,
    dram_tokens=100_000,
    overheads=Overheads(request_s=0.005, turnover_s=0.1),
)
SPEC = ClusterSpec(model=MODEL, num_prefill=1, num_decode=1, block_size=32, policy="moonserve")


def queued(turnover_s: float) -> list[Answered]:
    """Prompts of one moment on one machine, one after the other, shortest first."""
    found: list[Answered] = []
    free_at = 0.005
    for tokens in (100, 300, 500, 700):
        first_token_at = free_at + PREFILL.seconds(tokens, 0)
        one = answered("prefill-0", free_at, first_token_at, step_s=0.01, num_steps=0)
        found.append(
            replace(
                one,
                num_tokens=tokens,
                sent_at=0.0,
                placed_s=0.003,
                token_at=(first_token_at, first_token_at + 0.01),
            )
        )
        free_at = first_token_at + turnover_s
    return found


@pytest.mark.parametrize("turnover_s", [0.0, 0.004, 0.03])
def test_what_single_terms_do_not_explain_becomes_the_turnover(turnover_s: float) -> None:
    """Whatever it was before; nothing else changes, and nothing at all without bursts."""
    found = calibrated(SPEC, [queued(turnover_s)] * 3)
    assert found.model.overheads.turnover_s == NEAR(turnover_s, abs=3e-4)
    overheads = replace(found.model.overheads, turnover_s=0.1)
    assert replace(found, model=replace(found.model, overheads=overheads)) == SPEC
    assert calibrated(SPEC, []) is SPEC
