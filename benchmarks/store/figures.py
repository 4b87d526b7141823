"""Computes the figures of the speed part: medians over rounds, with the best mode of each store. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.measure import median
from benchmarks.store.seats import Result, Sample
from benchmarks.store.workload import EXISTS, OPS, SIZES, Load, describe


def figures(result: Result, sizes: Sequence[str]) -> dict[str, Any]:
    """Returns one store's part of the JSON."""
    return {
        "group": result.contestant.group,
        "absent": result.absent,
        "errors": {describe(load): error for load, error in result.errors.items()},
        "cells": {size: {op: cell for op in OPS if (cell := _cell(result, Load(op, *SIZES[size])))} for size in sizes},
        "exists": _cell(result, EXISTS),
    }


def _cell(result: Result, load: Load) -> dict[str, Any] | None:
    by_mode = {mode: samples for (of, mode), samples in result.samples.items() if of == load}
    if not by_mode or load in result.errors:
        return None
    mode = max(by_mode, key=lambda mode: median([sample.values_s for sample in by_mode[mode]]))
    return {"mode": mode, **_summary(by_mode[mode])}


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "gb_s": median([sample.gb_s for sample in samples]),
        "values_s": median([sample.values_s for sample in samples]),
        "p50_us": median([sample.p50_us for sample in samples]),
        "p99_us": median([sample.p99_us for sample in samples]),
        "values_s_rounds": [round(sample.values_s, 2) for sample in samples],
        "p50_us_rounds": [round(sample.p50_us, 2) for sample in samples],
    }
