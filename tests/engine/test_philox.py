"""The generator is Philox 4x64-10, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from engine.philox import random_bits, uniform


@pytest.mark.parametrize(
    ("key", "counter"), [(0, 1), (1, 1), (42, 77), (2**64 - 1, 2**40), (123456789, 8192)]
)
def test_bits_equal_numpys_philox(key: int, counter: int) -> None:
    # numpy steps its counter before it generates.
    reference = np.random.Philox(key=np.array([key, 0], np.uint64), counter=counter - 1)
    assert random_bits(key, counter) == int(reference.random_raw())


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in (
        [uniform(7, position) for position in range(4000)],
        [uniform(seed, 7) for seed in range(4000)],
    ):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        chi_square = float(np.sum((counts - 200) ** 2 / 200))
        assert chi_square < 43.8  # 0.1 % quantile, 19 degrees of freedom
        assert min(numbers) >= 0
        assert max(numbers) < 1
