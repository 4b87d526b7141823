"""The timing profile: a fit without negative coefficients, kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.profile import _fit, _Point, measure, measure_cached
from tests.engine.conftest import Pair


def test_a_fit_finds_the_coefficients_that_made_the_points() -> None:
    points = [
        _Point(x1, x2, 0.002 + 3e-5 * x1 + 4e-8 * x2)
        for x1, x2 in ((16, 256), (64, 4096), (512, 262144), (256, 196608), (1024, 1048576))
    ]
    assert _fit(points) == pytest.approx((0.002, 3e-5, 4e-8), rel=1e-6)


def test_a_fit_is_never_negative() -> None:
    points = [_Point(1, 10, 0.5), _Point(2, 20, 0.4), _Point(4, 80, 0.3), _Point(8, 60, 0.2)]
    assert min(_fit(points)) >= 0
    assert max(_fit(points)) > 0


def test_a_measurement_predicts_times_above_zero(llama: Pair) -> None:
    prefill, decode = measure(llama.engine(), budget_s=0.2)
    assert prefill.c0 + prefill.c1 * 100 + prefill.c2 * 100**2 > 0
    assert decode.c0 + decode.c1 * 4 + decode.c2 * 400 > 0


def test_a_measurement_is_made_once_and_kept(llama: Pair, tmp_path: Path) -> None:
    engine = llama.engine()
    first = measure_cached(engine, tmp_path)
    [kept] = tmp_path.iterdir()
    assert measure_cached(engine, tmp_path) == first
    kept.write_text("{")
    measure_cached(engine, tmp_path)
    assert kept.read_text() != "{"
