"""From observations to terms: what was put in comes out, and noise on one side of a comparison does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.profile.probe import steps_between
from deploy.profile.runs import Observations, PromptRun, StepRun
from deploy.profile.terms import terms_of
from protocol.errors import ConfigError
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.timeline import Timeline

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


def test_a_gap_in_the_numbers_of_others_ends_the_factors() -> None:
    prompts = [prompt(1024), prompt(1024, num_others=2, slow=2.0)]
    assert terms_of(observed(beside_prompts=prompts), CHUNK).crowding.prefill == (1.0,)
    assert terms_of(observed(beside_prompts=[]), CHUNK).crowding.prefill == ()


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


def test_tokens_that_all_come_at_one_instant_tell_no_step() -> None:
    """Prompts beside them were so short that the client read all of them at once."""
    bunch = Timeline(0.0, (0.0, *[0.05] * 5, 0.1))
    assert steps_between([bunch], 100, 0.04, 0.06, num_others=1) == []


def test_tokens_that_reach_the_client_together_are_steps_all_the_same() -> None:
    """Ten steps in 0.1 s, seen as two bursts of five: 10 ms each, though most gaps are 0."""
    bursts = Timeline(0.0, (0.0, *[0.05] * 5, *[0.1] * 5))
    (run,) = steps_between([bursts], 100, 0.0, 0.1, num_others=0)
    assert run.seconds == NEAR(0.01)


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
    assert sum(gaps) / len(gaps) == NEAR(1.0)
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


def test_company_makes_nobody_faster() -> None:
    prompts = [prompt(1024), prompt(1024, num_others=1, slow=0.8)]
    assert terms_of(observed(beside_prompts=prompts), CHUNK).crowding.prefill == (1.0, 1.0)
