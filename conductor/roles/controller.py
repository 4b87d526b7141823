"""When a worker should change between prefill and decode, and which. Pure.

Loads are relative to the latency targets: 1 = the target is just met. The rule: a role that is above the upper
threshold is helped by the other one if that would stay below the lower threshold *with one worker less*, has one to
spare that can change, and all this has held for a while. So a change that was right leaves nothing that asks for the
way back: who gave is below the lower threshold. Knows neither how loads come about nor how a worker is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTerms:
    """Raises ConfigError for values that would oscillate."""

    # Above, requests are soon rejected: a placement's own work comes on top of what is there.
    high: float = 0.7
    # Room for bursts in what is left to who gave.
    low: float = 0.5
    # Longer than a burst of arrivals, shorter than the minutes in which the mix of requests changes.
    hold_s: float = 10.0
    # A worker drains before it changes, and what its change does must show before the next.
    cool_down_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ConfigError(f"roles: {self.low} is not above 0 and below {self.high}")
        if min(self.hold_s, self.cool_down_s) < 0:
            raise ConfigError("--role-hold-s and --role-cool-down-s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """One worker as the controller sees it."""

    instance_id: InstanceId
    role: Role
    can_change: bool
    draining: bool
    need: float  # how close its target is to being missed
    use: float  # how much of what it can do is asked of it; at least `need`


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """This worker is to take this role."""

    instance_id: InstanceId
    role: Role


class RoleController:
    """Asked regularly, with all workers; times are monotonic seconds."""

    def __init__(self, terms: RoleTerms) -> None:
        self._terms = terms
        self._wanted: Role | None = None  # the role that lacks a worker
        self._since = -math.inf  # with it
        self._not_before = -math.inf

    def decide(self, loads: Sequence[WorkerLoad], now: float) -> RoleChange | None:
        """The change that is due now. Its outcome shows in later loads, or does not."""
        wanted = _lacking(loads, self._terms)
        if wanted is not self._wanted:
            self._wanted, self._since = wanted, now
        if wanted is None or now < max(self._since + self._terms.hold_s, self._not_before):
            return None
        self._not_before = now + self._terms.cool_down_s
        self._wanted = None
        giver = min(_able(loads, _OTHER[wanted]), key=lambda load: (load.use, load.instance_id))
        return RoleChange(instance_id=giver.instance_id, role=wanted)

    def validate(self) -> None:
        assert self._wanted in (None, Role.PREFILL, Role.DECODE)
        assert self._wanted is None or self._since > -math.inf


def _lacking(loads: Sequence[WorkerLoad], terms: RoleTerms) -> Role | None:
    """The role that should get a worker; none while one is leaving, since what it leaves behind is not known yet."""
    if any(load.draining for load in loads):
        return None
    for role, other in _OTHER.items():
        helped = [load for load in loads if load.role is role]
        givers = [load for load in loads if load.role is other]
        if not helped or len(givers) < 2 or not _able(loads, other):
            continue
        need = sum(load.need for load in helped) / len(helped)
        left = sum(load.use for load in givers) / (len(givers) - 1)
        if need >= terms.high and left <= terms.low:
            return role
    return None


def _able(loads: Sequence[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [load for load in loads if load.role is role and load.can_change]
