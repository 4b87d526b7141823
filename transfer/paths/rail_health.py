"""Tracks rails that failed too often recently and cool down for a while.

Owns the errors and cooldowns of each key (a pair of rails, for the engine). Its rule: after three errors within ten
seconds a key cools down for 30 s. The first use after a cooldown is a trial: its failure doubles the next cooldown up
to 300 s, and its success clears the record. Pure: time is an argument. A cooling key is not forbidden: a caller without
a better one may use it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class CooldownRule:
    """Parameters of errors and cooldowns, as published for Mooncake's transfer engine."""

    errors: int = 3
    within_s: float = 10.0
    first_cooldown_s: float = 30.0
    max_cooldown_s: float = 300.0
    same_incident_s: float = 0.05
    """Errors closer than this to the last counted one are the same event. A broken connection fails all of its slices
    at once, and one broken connection must not cool down a rail."""


class RailCondition(StrEnum):
    """State of a key at one moment."""

    HEALTHY = "healthy"
    TRIAL = "trial"
    """The cooldown is over, and nothing has succeeded or failed since."""
    COOLING_DOWN = "cooling_down"


@dataclass(slots=True, eq=False)
class _ErrorRecord:
    """Record of a key with errors. A key without errors has no record, which keeps the healthy case cheap."""

    errors_at: list[float] = field(default_factory=list)
    """Counted errors before the first cooldown, oldest first, at most `errors` − 1."""
    cooldown_ends_at: float | None = None
    cooldown_s: float = 0.0
    """Length of the last cooldown; 0 before the first."""


class RailHealth:
    """Errors, cooldowns and trials by key. Not thread-safe; every method is O(1)."""

    def __init__(self, rule: CooldownRule | None = None) -> None:
        self._rule = rule or CooldownRule()
        self._records: dict[Hashable, _ErrorRecord] = {}

    @property
    def all_healthy(self) -> bool:
        """True if no key cools down, is on trial or has an error that still counts. False may be out of date."""
        return not self._records

    def failed(self, key: Hashable, now: float) -> bool:
        """Counts an error and returns True if the key cools down from now on. Errors during a cooldown change
        nothing, since their slices were sent before it."""
        record = self._records.setdefault(key, _ErrorRecord())
        if record.cooldown_ends_at is not None:
            return now >= record.cooldown_ends_at and self._start_cooldown(record, now)
        rule, errors_at = self._rule, record.errors_at
        if errors_at and now - errors_at[-1] < rule.same_incident_s:
            return False
        errors_at[:] = [at for at in errors_at if now - at <= rule.within_s]
        errors_at.append(now)
        return len(errors_at) >= rule.errors and self._start_cooldown(record, now)

    def succeeded(self, key: Hashable, now: float) -> None:
        """Counts a success. Successes during a cooldown change nothing."""
        record = self._records.get(key)
        if record is None:
            return
        if record.cooldown_ends_at is None:
            is_over = now - record.errors_at[-1] > self._rule.within_s
        else:
            is_over = now >= record.cooldown_ends_at
        if is_over:
            del self._records[key]

    def condition(self, key: Hashable, now: float) -> RailCondition:
        ends_at = self.cooldown_ends_at(key)
        if ends_at is None:
            return RailCondition.HEALTHY
        return RailCondition.COOLING_DOWN if now < ends_at else RailCondition.TRIAL

    def cooldown_ends_at(self, key: Hashable) -> float | None:
        """Returns when the key's last cooldown ends or ended; None for a key without one."""
        record = self._records.get(key)
        return None if record is None else record.cooldown_ends_at

    def validate(self) -> None:
        """Checks the records. Raises AssertionError if one breaks the rule."""
        for record in self._records.values():
            assert record.errors_at == sorted(record.errors_at)
            assert len(record.errors_at) < self._rule.errors
            assert (record.cooldown_ends_at is None) == (record.cooldown_s == 0.0)
            assert not (record.errors_at and record.cooldown_s)
            assert 0.0 <= record.cooldown_s <= self._rule.max_cooldown_s

    def _start_cooldown(self, record: _ErrorRecord, now: float) -> bool:
        doubled = 2 * record.cooldown_s if record.cooldown_s else self._rule.first_cooldown_s
        record.cooldown_s = min(doubled, self._rule.max_cooldown_s)
        record.cooldown_ends_at = now + record.cooldown_s
        record.errors_at.clear()
        return True
