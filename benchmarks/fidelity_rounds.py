"""Combines several rounds of a comparison: medians, and the ranges of errors. Pure functions.

Each round has its own profile, replay and simulation, so that a slow phase of the machine affects both sides of the
round's errors. The module knows the meaning of no figure except `errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def combined(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of every number, and `error_ranges`: the least and the greatest of each error. An error is the
    median of the rounds' errors, not the error of the medians."""
    ranges = {
        name: [min(found), max(found)]
        for name in rounds[0]["errors"]
        if (found := [each["errors"][name] for each in rounds])
    }
    return {**_middle(rounds), "error_ranges": ranges, "rounds": len(rounds)}


def _middle(values: Sequence[Any]) -> Any:
    """Returns medians element by element. Lists are cut to the shortest; other values come from the first round."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _middle([each[name] for each in values]) for name in first}
    if isinstance(first, list):
        return [_middle(together) for together in zip(*values, strict=False)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return median(values)
