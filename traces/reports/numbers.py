"""Formats numbers for tables and axes. Missing values are a dash."""

from __future__ import annotations

import math

NOTHING = "–"

_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def plain(value: float) -> str:
    """Formats a count: 12,031."""
    return f"{value:,.0f}"


def percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def milliseconds(value: float) -> str:
    """Formats with one decimal below 100, otherwise with none."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def seconds(value_ms: float) -> str:
    """Formats milliseconds as seconds, with three decimals below 1, otherwise with two."""
    if not math.isfinite(value_ms):
        return NOTHING
    value = value_ms / 1000
    return f"{value:,.3f}" if abs(value) < 1 else f"{value:,.2f}"


def scaled(value: float) -> str:
    """Formats a counter of any size: 512, 0.25, 12.3 M."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) < 100_000:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
    step = min(int(math.log10(abs(value)) // 3), len(_THOUSANDS) - 1)
    return f"{value / 1000**step:.4g} {_THOUSANDS[step]}"


def tick(value: float, _position: object = None) -> str:
    """Formats a number on an axis: 0.01, 1, 30, 5k, 2M. Avoids mathematical notation, whose glyphs few fonts have."""
    for step in range(len(_THOUSANDS) - 1, 0, -1):
        if abs(value) >= 1000**step:
            return f"{value / 1000**step:g}{_THOUSANDS[step]}"
    return f"{value:g}"
