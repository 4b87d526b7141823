"""Arrivals have the rate, the burstiness and the profile that were asked for."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.analysis.measures import describe_arrivals
from traces.synthesis.workload import ArrivalSpec, arrival_times


def times(spec: ArrivalSpec, count: int = 20_000) -> list[float]:
    return list(islice(arrival_times(spec, Random(3)), count))


@pytest.mark.parametrize(
    ("spec", "gap_cv"),
    [
        (ArrivalSpec(rate=5, process="constant"), 0.0),
        (ArrivalSpec(rate=5, process="poisson"), 1.0),
        (ArrivalSpec(rate=5, process="gamma", burstiness=0.5), 0.5),
        (ArrivalSpec(rate=5, process="gamma", burstiness=3), 3.0),
    ],
)
def test_rate_and_burstiness_are_as_asked(spec: ArrivalSpec, gap_cv: float) -> None:
    arrivals = describe_arrivals(times(spec), window_s=60)
    assert arrivals["mean_rate"] == pytest.approx(5, rel=0.06)
    assert arrivals["gap_cv"] == pytest.approx(gap_cv, rel=0.08, abs=1e-6)


def test_a_day_has_its_quiet_and_its_busy_hours() -> None:
    """Amplitude 0.8: nine times as many at noon as at midnight, and the mean over a day is the rate."""
    spec = ArrivalSpec(rate=2, process="constant", diurnal_amplitude=0.8, diurnal_period_s=10_000)
    counts = np.histogram(times(spec), bins=100, range=(0, 10_000))[0]
    assert counts.sum() == pytest.approx(20_000, abs=2)
    assert counts[0] == pytest.approx(2 * 100 * 0.2, rel=0.1)
    assert counts[50] == pytest.approx(2 * 100 * 1.8, rel=0.02)


@given(st.floats(0.01, 1e4), st.floats(0, 1), st.floats(1, 1e6))
def test_time_never_runs_back(rate: float, amplitude: float, period_s: float) -> None:
    spec = ArrivalSpec(rate=rate, diurnal_amplitude=amplitude, diurnal_period_s=period_s)
    assert all(early <= late for early, late in pairwise(times(spec, 50)))
