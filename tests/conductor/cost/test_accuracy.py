"""The record of predictions: quantiles beside numpy's, by term, fading."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.cost.accuracy import Accuracy, Term, Times


@given(st.lists(st.floats(0.002, 50.0), min_size=1, max_size=60))
def test_quantiles_are_numpy_s_within_5_percent(errors: list[float]) -> None:
    accuracy = Accuracy()
    for error in errors:
        accuracy.observe(Times(ttft_s=2.0 * (1.0 + error)), Times(ttft_s=2.0))
    found = accuracy.of(Term.TTFT)
    assert found is not None
    # The oldest of 60 weighs 0.81 of the newest: a quantile is within a tenth of the ranks.
    for value, q in ((found.p50, 0.5), (found.p90, 0.9)):
        low = np.quantile(errors, max(q - 0.1, 0.0), method="inverted_cdf")
        high = np.quantile(errors, min(q + 0.1, 1.0), method="inverted_cdf")
        assert low / 1.05 <= value <= high * 1.05
    accuracy.validate()


def test_terms_are_shares_of_the_whole_and_only_where_known() -> None:
    accuracy = Accuracy()
    for _ in range(50):
        accuracy.observe(
            Times(ttft_s=1.2, queue_s=0.5, prefill_s=0.7), Times(ttft_s=1.0, queue_s=0.0)
        )
    whole, queue = accuracy.of(Term.TTFT), accuracy.of(Term.QUEUE)
    assert whole is not None
    assert queue is not None
    assert whole.p50 == pytest.approx(0.2, rel=0.05)
    assert queue.p50 == pytest.approx(0.5, rel=0.05)
    assert whole.bias == pytest.approx(0.2)
    assert accuracy.of(Term.PREFILL) is None
    assert accuracy.of(Term.TRANSFER) is None


def test_a_model_that_became_good_is_known_to_be() -> None:
    """Ten half-lives after."""
    accuracy = Accuracy()
    for predicted_s in [3.0] * 500 + [1.01] * 2000:
        accuracy.observe(Times(ttft_s=predicted_s), Times(ttft_s=1.0))
    found = accuracy.of(Term.TTFT)
    assert found is not None
    assert found.p90 == pytest.approx(0.01, rel=0.05)
    assert found.bias == pytest.approx(0.01, abs=0.01)


@pytest.mark.parametrize("actual_s", [0.0, -1.0, math.nan])
def test_impossible_times_say_nothing(actual_s: float) -> None:
    accuracy = Accuracy()
    accuracy.observe(Times(ttft_s=1.0), Times(ttft_s=actual_s))
    accuracy.observe(Times(ttft_s=math.inf), Times(ttft_s=1.0))
    assert accuracy.of(Term.TTFT) is None
    accuracy.validate()
