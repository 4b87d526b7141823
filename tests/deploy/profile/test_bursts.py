"""Bursts of prompts: whose steps and handoffs had how much company."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.profile.bursts import handoffs_of, steps_of
from deploy.profile.runs import Answered
from deploy.profile.terms import terms_of
from tests.deploy.profile.test_terms import CHUNK, DECODE, NEAR, observed, prompt, step

TOKENS = 500


def answered(
    machine: str, computes_from: float, first_token_at: float, *, step_s: float, num_steps: int
) -> Answered:
    """A handoff of 20 ms beside the first step."""
    second = first_token_at + 0.02 + step_s
    later = (second + step_s * number for number in range(num_steps))
    return Answered(
        machine=machine,
        num_tokens=TOKENS,
        sent_at=computes_from - 0.01,
        placed_s=0.004,
        computes_from=computes_from,
        computes_until=first_token_at,
        token_at=(first_token_at, *later),
    )


def test_steps_are_told_apart_by_the_machines_that_compute_during_them() -> None:
    """The first answer has ten steps of 10 ms beside another prompt, then ten of 5 ms beside nobody."""
    second = answered("prefill-0", 0.1, 0.23, step_s=0.005, num_steps=1)
    first = answered("prefill-0", 0.0, 0.1, step_s=0.01, num_steps=11)
    alone = tuple(first.token_at[-1] + 0.005 * (n + 1) for n in range(10))
    first = replace(first, token_at=first.token_at + alone)
    beside, after = sorted(steps_of([first, second]), key=lambda run: -run.num_others)
    assert (beside.num_others, after.num_others) == (1, 0)
    assert (beside.seconds, after.seconds) == (NEAR(0.01), NEAR(0.005))
    assert len(beside.gaps_s) + len(after.gaps_s) == 20
    assert (beside.num_seqs, beside.prompt_tokens) == (1, TOKENS)
    assert TOKENS < beside.context_tokens < after.context_tokens <= TOKENS + 21


def test_two_machines_are_counted_once_each_and_sequences_side_by_side_are_a_batch() -> None:
    """Two streams at once, beside one machine with two prompts and another with one."""
    streams = [answered(f"prefill-{n}", 0.0, 0.1, step_s=0.01, num_steps=20) for n in range(2)]
    others = [answered(f"prefill-{n % 2}", 0.1, 9.0, step_s=0.01, num_steps=1) for n in range(3)]
    runs = [run for run in steps_of([*streams, *others]) if run.num_seqs == 2]
    assert len(runs) == 2
    assert all(run.num_others == 2 and run.context_tokens > 2 * TOKENS for run in runs)


def test_a_handoff_is_what_the_second_gap_is_longer_than_a_step() -> None:
    """Its own machine goes on with the next prompt, which is company."""
    first = answered("prefill-0", 0.0, 0.1, step_s=0.01, num_steps=10)
    second = answered("prefill-0", 0.1, 0.5, step_s=0.01, num_steps=10)
    found = handoffs_of([first, second])
    assert [(run.num_prefills, run.seconds) for run in found] == [(1, NEAR(0.02)), (0, NEAR(0.02))]


def test_tokens_that_come_at_one_instant_tell_no_step() -> None:
    bunch = replace(
        answered("prefill-0", 0.0, 0.1, step_s=0.01, num_steps=2), token_at=(0.1, *[0.2] * 9)
    )
    assert steps_of([bunch]) == []


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_crowding_is_what_bursts_show_and_not_long_answers(slow: float) -> None:
    """Answers of two prompts while a third and longest one is computed; the handoff alone takes 6 ms."""
    step_s = slow * DECODE.step_s(1, TOKENS + 10)
    burst = [
        answered("prefill-0", 0.0, 0.1, step_s=step_s, num_steps=20),
        answered("prefill-0", 0.1, 9.0, step_s=step_s, num_steps=1),
    ]
    seen = observed(
        answered=[burst],
        beside_prompts=[prompt(1024)],
        beside_steps=[step(1, 500), step(1, 500, num_others=1, slow=7.0)],
    )
    terms = terms_of(seen, CHUNK)
    assert terms.crowding.decode == NEAR((1.0, slow), rel=1e-2)
    assert terms.crowding.handoff == NEAR((1.0, 0.02 / 0.006))
