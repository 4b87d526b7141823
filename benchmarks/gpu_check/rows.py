"""Rows of the table: passed, failed or skipped, each with its figure and its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one verification."""

    name: str
    status: Status
    found: str = ""
    asked: str = ""  # the requirement
    reason: str = ""  # of a failure or a skip
    figures: Mapping[str, float] = field(default_factory=dict)


def skipped(name: str, reason: str) -> Row:
    return Row(name=name, status="skipped", reason=reason)


def failed(name: str, error: Exception) -> Row:
    text = str(error).strip() or type(error).__name__
    return Row(name=name, status="fail", reason=f"{type(error).__name__}: {text.splitlines()[0]}")


def guarded(name: str, verify: Callable[[str], Row]) -> Row:
    """Returns the row of `verify(name)`. An exception becomes a failed row of that name, and the others still run."""
    try:
        return verify(name)
    except Exception as error:  # compilers, drivers and devices have exceptions of their own
        return failed(name, error)


def at_least(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Returns a row that passes if `value` is at least `bar`."""
    reason = "" if value >= bar else f"{value:.3g} is below {bar:.3g}"
    return _compared(name, value, bar, found, asked, reason)


def at_most(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Returns a row that passes if `value` is at most `bar`; NaN fails."""
    reason = "" if value <= bar else f"{value:.3g} is above {bar:.3g}"
    return _compared(name, value, bar, found, asked, reason)


def _compared(name: str, value: float, bar: float, found: str, asked: str, reason: str) -> Row:
    return Row(
        name=name,
        status="fail" if reason else "pass",
        found=found,
        asked=asked,
        reason=reason,
        figures={"value": value, "bar": bar},
    )
