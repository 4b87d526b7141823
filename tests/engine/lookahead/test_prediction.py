"""Predictor and Outlook: requests are told apart, bounds always hold, sums are like those of draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lookahead.prediction import HORIZONS, LEAST, Predictor, outlook
from tests.engine.lookahead.asking import Asking
from tests.thoroughness import examples

FAR = 100_000


def learned(lengths: list[int], **of: object) -> Predictor:
    predictor = Predictor()
    for number, length in enumerate(lengths):
        request = Asking(number, max_tokens=FAR, generated=length, **of)  # type: ignore[arg-type]
        predictor.ended(request, stopped=False)
    return predictor


def alive(predictor: Predictor, request: Asking, steps: int) -> float:
    """P(the request still runs after so many more tokens)."""
    return float(predictor.alive([request], np.array([steps]))[0, 0])


def test_what_remains_of_a_running_request_is_that_of_those_who_came_so_far() -> None:
    """Half of all end after 10 tokens, the others after 1,000: whoever passed 10 has 1,000 before it."""
    predictor = learned([10, 1000] * 100)
    assert alive(predictor, Asking(0, max_tokens=FAR, generated=0), 20) == pytest.approx(0.5, abs=0.1)
    assert alive(predictor, Asking(0, max_tokens=FAR, generated=20), 850) > 0.9


@pytest.mark.parametrize(
    ("short", "long"),
    [({"tenant": "a"}, {"tenant": "b"}), ({"num_prompt_tokens": 20_000}, {"num_prompt_tokens": 20})],
    ids=["tenant", "prompt"],
)
def test_requests_are_told_apart(short: dict[str, Any], long: dict[str, Any]) -> None:
    predictor = Predictor()
    for number in range(200):
        for of, length in ((short, 8), (long, 2000)):
            request = Asking(number, max_tokens=FAR, generated=length, **of)
            predictor.ended(request, stopped=False)
    assert alive(predictor, Asking(0, max_tokens=FAR, **short), 20) < 0.1
    assert alive(predictor, Asking(0, max_tokens=FAR, **long), 1500) > 0.9


def test_too_few_ends_say_nothing() -> None:
    """A request is then expected to use up its limit."""
    few, enough = learned([5] * (LEAST - 1)), learned([5] * LEAST)
    assert alive(few, Asking(0, max_tokens=300), 298) == 1.0
    assert alive(enough, Asking(0, max_tokens=300), 298) < 0.1


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.lists(
        st.builds(
            Asking, st.integers(0, 9), st.integers(1, 9000), st.integers(1, 4000), st.integers(1, 4000),
            tenant=st.sampled_from(["", "a"]),
        ),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
def test_probabilities_fall_with_time_and_end_at_the_limit(lengths: list[int], requests: list[Asking]) -> None:
    alive = learned(lengths).alive(requests, HORIZONS)
    assert ((alive >= 0.0) & (alive <= 1.0 + 1e-9)).all()
    assert (np.diff(alive, axis=1) <= 1e-9).all()
    for row, request in zip(alive, requests, strict=True):
        assert not row[request.generated + HORIZONS >= request.max_tokens].any()


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 3000), max_size=60),
    st.lists(
        st.builds(Asking, st.integers(0, 9), st.integers(1, 9000), st.integers(1, 4000)),
        min_size=1, max_size=8,
    ),
    st.floats(0.0, 4.0),
)  # fmt: skip
def test_a_peak_is_between_what_is_there_and_what_may_ever_be(
    lengths: list[int], requests: list[Asking], deviations: float
) -> None:
    found = outlook(requests, learned(lengths), 16)
    now = sum(-(-each.num_tokens // 16) for each in requests)
    ever = sum(-(-(each.num_prompt_tokens + max(each.max_tokens, 1)) // 16) for each in requests)
    assert now <= found.peak(deviations) <= ever
    assert found.peak(deviations) <= found.peak(deviations + 1.0)
    assert (found.mean <= found.most + 1e-6)[1:].all()


def test_mean_and_spread_are_those_of_draws() -> None:
    """64 requests at different points of lognormal answers, beside 4,000 draws of what they come to."""
    draw = np.random.default_rng(3)
    lengths = np.maximum(np.round(draw.lognormal(5.5, 0.8, 5000)), 1).astype(int)
    predictor = learned(lengths.tolist())
    requests = [Asking(n, 50 + 20 * n, FAR, generated=1 + 12 * (n % 16)) for n in range(64)]
    found = outlook(requests, predictor, 16)
    for index in (8, 12, 16):  # 16, 64, 256 steps ahead
        steps = int(HORIZONS[index])
        totals = np.zeros(4000)
        for request in requests:
            longer = lengths[lengths > request.generated]
            ends = draw.choice(longer, 4000)
            held = -(-(request.num_tokens + steps) // 16)
            totals += np.where(ends > request.generated + steps, held, 0)
        assert found.mean[index] == pytest.approx(totals.mean(), rel=0.06)
        assert found.variance[index] ** 0.5 == pytest.approx(totals.std(), rel=0.15)


def test_the_next_end_is_as_far_as_answers_are_long_among_as_many() -> None:
    """Of those who end after 1,000 tokens, and are evenly spread over that, every 50th step ends one of 20."""
    predictor = learned([1000] * 200)
    requests = [Asking(n, 100, FAR, generated=25 + 50 * n) for n in range(20)]
    assert outlook(requests, predictor, 16).steps_to_end == pytest.approx(50, rel=0.5)
    assert outlook(requests[:1], predictor, 16).steps_to_end == pytest.approx(975, rel=0.5)
