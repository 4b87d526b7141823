"""When a cluster should have one worker more or less of a role. Pure.

Loads are the conductor's (`conductor.roles`): 1 = the latency target is just met, as predicted of what was placed.
The rule: a role whose mean need is above the upper threshold gets a worker, and one that would use less than the lower
threshold *with one worker less* loses one, each if that has held for a while, within the bounds, and not while anybody
starts or leaves. So what was right under a constant load leaves nothing that asks for the way back. Where workers can
change roles the conductor moves them first: as long as the other role could give one, nothing is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conductor.roles.controller import RoleTerms, WorkerLoad
from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role

ROLES = (Role.PREFILL, Role.DECODE)
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
_ROLE_TERMS = RoleTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTerms:
    """Raises ConfigError for values that would oscillate."""

    # As for role switching (`RoleTerms`), and lower for leaving: a worker costs more to bring back.
    high: float = _ROLE_TERMS.high
    low: float = 0.4
    up_hold_s: float = 20.0  # longer than role switching takes to decide
    down_hold_s: float = 300.0
    cool_down_s: float = 60.0  # what a change does must show before the next

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ConfigError(f"low {self.low} must be above 0 and below high {self.high}")
        if min(self.up_hold_s, self.down_hold_s, self.cool_down_s) < 0:
            raise ConfigError("up_hold_s, down_hold_s and cool_down_s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How many workers a role has at least and at most."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grow:
    """A worker of this role is to be added."""

    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """This worker is to drain and leave."""

    instance_id: InstanceId
    role: Role


Change = Grow | Shrink


class Autoscaler:
    """Asked regularly, with all workers that the conductor knows; times are monotonic seconds."""

    def __init__(self, terms: ScaleTerms, bounds: Mapping[Role, Bounds]) -> None:
        self._terms = terms
        self._bounds = bounds
        self._wished: tuple[Role, int] | None = None  # the role, and +1 or -1
        self._since = -math.inf  # with it
        self._not_before = -math.inf

    def decide(self, loads: Sequence[WorkerLoad], num_wanted: int, now: float) -> Change | None:
        """The change that is due now. `num_wanted`: workers that there are to be, of both roles: while the conductor
        knows another number, some start or leave."""
        wished = self._wish(loads, num_wanted)
        if wished != self._wished:
            self._wished, self._since = wished, now
        if wished is None or now < self._not_before:
            return None
        role, step = wished
        hold_s = self._terms.up_hold_s if step > 0 else self._terms.down_hold_s
        if now < self._since + hold_s:
            return None
        self._not_before = now + self._terms.cool_down_s
        self._wished = None
        if step > 0:
            return Grow(role=role)
        least_used = min(_of(loads, role), key=lambda each: (each.use, each.instance_id))
        return Shrink(instance_id=least_used.instance_id, role=role)

    def _wish(self, loads: Sequence[WorkerLoad], num_wanted: int) -> tuple[Role, int] | None:
        if len(loads) != num_wanted or any(load.draining for load in loads):
            return None
        for role in ROLES:
            if self._lacks(loads, role) and not self._can_be_helped(loads, role):
                return role, 1
        for role in ROLES:
            if self._has_too_many(loads, role) and not self._lacks(loads, _OTHER[role]):
                return role, -1
        return None

    def _lacks(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        own = _of(loads, role)
        if not 0 < len(own) < self._bounds[role].most:
            return False
        return sum(load.need for load in own) / len(own) >= self._terms.high

    def _has_too_many(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        own = _of(loads, role)
        if len(own) <= self._bounds[role].least:
            return False
        return sum(load.use for load in own) / (len(own) - 1) <= self._terms.low

    def _can_be_helped(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        """The conductor will have a worker change its role (`conductor.roles`), which costs a second and no machine."""
        givers = _of(loads, _OTHER[role])
        if len(givers) < 2 or not any(load.can_change for load in givers):
            return False
        return sum(load.use for load in givers) / (len(givers) - 1) <= _ROLE_TERMS.low

    def validate(self) -> None:
        assert self._wished is None or self._since > -math.inf


def _of(loads: Sequence[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [load for load in loads if load.role is role]
