"""Tracks rails that failed too often recently and rest for a while.

Owns the errors and rests of each key (a pair of rails, for the engine). Its rule: three errors within ten seconds rest
a key for 30 s. The first use after a rest is a trial: its failure doubles the next rest up to 300 s, and its success
clears the record. Pure: time is an argument. A resting key is not forbidden: a caller without a better one may use it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class RestRule:
    """Parameters of errors and rests, as published for Mooncake's transfer engine."""

    errors: int = 3
    within_s: float = 10.0
    first_rest_s: float = 30.0
    longest_rest_s: float = 300.0
    same_incident_s: float = 0.05
    """Errors closer than this to the last counted one are the same event. A broken connection fails all of its slices
    at once, and one broken connection must not rest a rail."""


class Condition(StrEnum):
    """State of a key at one moment."""

    HEALTHY = "healthy"
    TRIAL = "trial"
    """The rest is over, and nothing has succeeded or failed since."""
    RESTING = "resting"


@dataclass(slots=True, eq=False)
class _Trouble:
    """Record of a key with errors. A key without errors has no record, which keeps the healthy case cheap."""

    errors_at: list[float] = field(default_factory=list)
    """Counted errors before the first rest, oldest first, at most `errors` − 1."""
    rest_ends_at: float | None = None
    rest_s: float = 0.0
    """Length of the last rest; 0 before the first."""


class RailHealth:
    """Errors, rests and trials by key. Not thread-safe; every method is O(1)."""

    def __init__(self, rule: RestRule | None = None) -> None:
        self._rule = rule or RestRule()
        self._troubles: dict[Hashable, _Trouble] = {}

    @property
    def all_healthy(self) -> bool:
        """True if no key rests, is on trial or has an error that still counts. False may be out of date."""
        return not self._troubles

    def failed(self, key: Hashable, now: float) -> bool:
        """Counts an error and returns True if the key rests from now on. Errors during a rest change nothing, since
        their slices were sent before it."""
        trouble = self._troubles.setdefault(key, _Trouble())
        if trouble.rest_ends_at is not None:
            return now >= trouble.rest_ends_at and self._rest(trouble, now)
        rule, errors_at = self._rule, trouble.errors_at
        if errors_at and now - errors_at[-1] < rule.same_incident_s:
            return False
        errors_at[:] = [at for at in errors_at if now - at <= rule.within_s]
        errors_at.append(now)
        return len(errors_at) >= rule.errors and self._rest(trouble, now)

    def succeeded(self, key: Hashable, now: float) -> None:
        """Counts a success. Successes during a rest change nothing."""
        trouble = self._troubles.get(key)
        if trouble is None:
            return
        if trouble.rest_ends_at is None:
            is_over = now - trouble.errors_at[-1] > self._rule.within_s
        else:
            is_over = now >= trouble.rest_ends_at
        if is_over:
            del self._troubles[key]

    def condition(self, key: Hashable, now: float) -> Condition:
        ends_at = self.rest_ends_at(key)
        if ends_at is None:
            return Condition.HEALTHY
        return Condition.RESTING if now < ends_at else Condition.TRIAL

    def rest_ends_at(self, key: Hashable) -> float | None:
        """Returns when the key's last rest ends or ended; None for a key that never rested."""
        trouble = self._troubles.get(key)
        return None if trouble is None else trouble.rest_ends_at

    def validate(self) -> None:
        """Checks the records. Raises AssertionError if one breaks the rule."""
        for trouble in self._troubles.values():
            assert trouble.errors_at == sorted(trouble.errors_at)
            assert len(trouble.errors_at) < self._rule.errors
            assert (trouble.rest_ends_at is None) == (trouble.rest_s == 0.0)
            assert not (trouble.errors_at and trouble.rest_s)
            assert 0.0 <= trouble.rest_s <= self._rule.longest_rest_s

    def _rest(self, trouble: _Trouble, now: float) -> bool:
        doubled = 2 * trouble.rest_s if trouble.rest_s else self._rule.first_rest_s
        trouble.rest_s = min(doubled, self._rule.longest_rest_s)
        trouble.rest_ends_at = now + trouble.rest_s
        trouble.errors_at.clear()
        return True
