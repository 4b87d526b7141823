"""The rank test of `benchmarks.isolation`."""

from __future__ import annotations

import random

import pytest

from benchmarks.rank_test import mann_whitney_p


def test_it_gives_what_the_textbook_gives() -> None:
    """scipy.stats.mannwhitneyu(a, b, method="asymptotic") of scipy 1.17."""
    a = [19, 22, 16, 29, 24, 22, 31]
    b = [20, 11, 17, 12, 22, 25]
    assert mann_whitney_p(a, b) == pytest.approx(0.17235939896143682, rel=1e-9)


def test_equal_samples_are_not_told_apart_and_shifted_ones_are() -> None:
    rng = random.Random(0)
    draws = [[rng.gauss(0, 1) for _ in range(200)] for _ in range(2)]
    assert mann_whitney_p(*draws) > 0.05
    assert mann_whitney_p(draws[0], [value + 0.5 for value in draws[1]]) < 0.001
    assert mann_whitney_p([1.0] * 30, [1.0] * 30) == 1.0


def test_one_in_twenty_of_equal_samples_is_below_a_twentieth() -> None:
    rng = random.Random(1)
    values = [
        mann_whitney_p(*([rng.random() for _ in range(40)] for _ in range(2))) for _ in range(1_000)
    ]
    assert 0.03 < sum(p < 0.05 for p in values) / 1_000 < 0.07
