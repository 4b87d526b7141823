"""Several rounds of a comparison as one: medians, and how far errors ranged. Pure.

Each round is profiled, replayed and simulated by itself, so that a minute in which the machine was slower is on both
sides of that round's errors. Knows nothing of what the figures mean but `errors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def combined(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of every number, and `error_ranges`: least and greatest of each error. Errors are the median of the
    rounds' errors, not the error of the medians."""
    ranges = {
        name: [min(found), max(found)]
        for name in rounds[0]["errors"]
        if (found := [each["errors"][name] for each in rounds])
    }
    return {**_middle(rounds), "error_ranges": ranges, "rounds": len(rounds)}


def _middle(values: Sequence[Any]) -> Any:
    """Element by element; lists as far as the shortest goes. What is no number is that of the first round."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _middle([each[name] for each in values]) for name in first}
    if isinstance(first, list):
        return [_middle(together) for together in zip(*values, strict=False)]
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return median(values)
