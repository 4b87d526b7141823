"""What the table consists of: rows that passed, failed or were skipped, each with its figure and its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was verified."""

    name: str
    status: Status
    found: str = ""
    asked: str = ""  # what it had to be
    reason: str = ""  # of a failure or a skip
    figures: Mapping[str, float] = field(default_factory=dict)


def skipped(name: str, reason: str) -> Row:
    return Row(name=name, status="skipped", reason=reason)


def failed(name: str, error: Exception) -> Row:
    text = str(error).strip() or type(error).__name__
    return Row(name=name, status="fail", reason=f"{type(error).__name__}: {text.splitlines()[0]}")


def guarded(name: str, verify: Callable[[str], Row]) -> Row:
    """What `verify(name)` finds; whatever it raises is a failed row of that name, and the others still run."""
    try:
        return verify(name)
    except Exception as error:  # also that of a compiler, a driver or a device: each has its own
        return failed(name, error)


def at_least(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Passed when `value` reaches `bar`."""
    reason = "" if value >= bar else f"{value:.3g} is below {bar:.3g}"
    return _compared(name, value, bar, found, asked, reason)


def at_most(name: str, value: float, bar: float, found: str, asked: str) -> Row:
    """Passed when `value` stays within `bar`; NaN does not."""
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
