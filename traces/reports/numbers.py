"""Numbers as people read them in tables and along axes. Nothing to tell is a dash."""

from __future__ import annotations

import math

NOTHING = "–"

_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def plain(value: float) -> str:
    """A count: 12,031."""
    return f"{value:,.0f}"


def percent(fraction: float) -> str:
    return f"{fraction:.1%}"


def milliseconds(value: float) -> str:
    """Tenths below 100, whole ones above."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def seconds(value_ms: float) -> str:
    """Of milliseconds, with as many decimals as make sense."""
    if not math.isfinite(value_ms):
        return NOTHING
    value = value_ms / 1000
    return f"{value:,.3f}" if abs(value) < 1 else f"{value:,.2f}"


def scaled(value: float) -> str:
    """A counter of any size: 512, 0.25, 12.3 M."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) < 100_000:
        return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
    step = min(int(math.log10(abs(value)) // 3), len(_THOUSANDS) - 1)
    return f"{value / 1000**step:.4g} {_THOUSANDS[step]}"


def tick(value: float, _position: object = None) -> str:
    """Along an axis: 0.01, 1, 30, 5k, 2M; never mathematical notation, whose glyphs few fonts have."""
    for step in range(len(_THOUSANDS) - 1, 0, -1):
        if abs(value) >= 1000**step:
            return f"{value / 1000**step:g}{_THOUSANDS[step]}"
    return f"{value:g}"
