"""Costs, and the margin that follows from them: caution where a preemption is dear, less of it where places are."""

from __future__ import annotations

import pytest

from engine.lookahead.allocator import Allocator
from engine.lookahead.costs import Costs
from engine.lookahead.lookahead import MARGIN, Lookahead
from protocol.profile import DecodeProfile, PrefillProfile
from tests.engine.lookahead.asking import Asking

DECODE = DecodeProfile(c0=0.025, c1=1e-4, c2=4e-8)
PREFILL = PrefillProfile(c0=0.0, c1=1e-4, c2=0.0)
COSTS = Costs(decode=DECODE, prefill=PREFILL)


def test_a_preemption_is_weighed_against_the_steps_of_an_empty_place() -> None:
    """1,000 tokens take 0.1 s from each of 10 sequences; 4 · 5 steps give a token more for 0.025 s each."""
    assert COSTS.tolerable(10, 1000.0, 5.0) == pytest.approx(0.5)
    assert COSTS.tolerable(20, 1000.0, 5.0) == pytest.approx(0.25)
    assert COSTS.tolerable(10, 2000.0, 5.0) == pytest.approx(0.25)


def test_what_costs_nothing_may_happen_always() -> None:
    free = Costs(decode=DECODE, prefill=PrefillProfile(c0=0.0, c1=0.0, c2=0.0))
    assert free.tolerable(10, 1000.0, 5.0) == 1.0


def margin_with(prompt: int, output: int) -> float:
    """After requests of such lengths were weighed."""
    policy = Lookahead(costs=COSTS)
    for number in range(200):
        policy.ended(Asking(number, prompt, 10_000, generated=output), stopped=False)
    allocator = Allocator(100_000, 16, policy)
    for number in range(20):
        assert allocator.admit(Asking(1000 + number, prompt, 10_000)) is not None
    return policy.margin


def test_long_prompts_and_short_answers_have_all_of_the_margin() -> None:
    assert margin_with(30_000, 20) == MARGIN


def test_short_prompts_and_long_answers_have_less_of_it() -> None:
    assert 0.0 <= margin_with(100, 2000) < 1.0


def test_without_costs_all_of_it_is_kept() -> None:
    policy = Lookahead()
    assert policy.margin == MARGIN
    Allocator(100, 16, policy).admit(Asking(0))
    assert policy.margin == MARGIN


def test_a_margin_that_preemptions_widened_narrows_faster_where_they_are_tolerable() -> None:
    def widened(costs: Costs | None) -> float:
        policy = Lookahead(costs=costs)
        allocator = Allocator(100_000, 16, policy)
        allocator.admit(Asking(0, 100, 2000))
        allocator.admit(Asking(1, 100, 2000))
        before = policy.margin
        allocator.preempt(Asking(1).request_id)
        allocator.admit(Asking(1, 100, 2000))
        return policy.margin - before

    assert widened(COSTS) < widened(None) <= 0.5
