"""Which processes there are to be, and when a role should have one worker more or less. Pure.

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
from deploy.plan import ROLES, Kind
from deploy.ray.config import ClusterConfig, ScaleTerms, Workers
from deploy.ray.units import Unit
from protocol.errors import ConfigError
from protocol.ids import InstanceId, Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A worker of this role is to be added, or `leaving` is to drain and leave."""

    role: Role
    leaving: InstanceId | None = None


class Autoscaler:
    """Asked regularly, with all workers that the conductor knows; times are monotonic seconds."""

    def __init__(self, terms: ScaleTerms, bounds: Mapping[Role, Workers]) -> None:
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
            return Change(role=role)
        least_used = min(_of(loads, role), key=lambda each: (each.use, each.instance_id))
        return Change(role=role, leaving=least_used.instance_id)

    def _wish(self, loads: Sequence[WorkerLoad], num_wanted: int) -> tuple[Role, int] | None:
        if len(loads) != num_wanted or any(load.draining for load in loads):
            return None
        for role in _OTHER:
            if self._lacks(loads, role) and not self._can_be_helped(loads, role):
                return role, 1
        for role in _OTHER:
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
        if len(own) <= self._bounds[role].min:
            return False
        return sum(load.use for load in own) / (len(own) - 1) <= self._terms.low

    def _can_be_helped(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        """The conductor will have a worker change its role (`conductor.roles`), which costs a second and no machine."""
        givers = _of(loads, _OTHER[role])
        if len(givers) < 2 or not any(load.can_change for load in givers):
            return False
        return sum(load.use for load in givers) / (len(givers) - 1) <= RoleTerms().low


def _of(loads: Sequence[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [load for load in loads if load.role is role]


# Stores follow the hosts, and there is one directory at most.
COUNTED = (Kind.CONDUCTOR, Kind.PREFILL, Kind.DECODE, Kind.GATEWAY)


class Wanted:
    """Numbers by kind. One that was dismissed leaves a gap, which the next addition fills."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        counts = {
            Kind.DIRECTORY: int(config.needs_directory),
            Kind.CONDUCTOR: config.conductors.count,
            Kind.PREFILL: config.prefill.count,
            Kind.DECODE: config.decode.count,
            Kind.GATEWAY: config.gateways.count,
        }
        self._numbers = {kind: set(range(count)) for kind, count in counts.items()}

    def units(self, stores: Sequence[int]) -> list[Unit]:
        """All, in the order in which they start. `stores`: numbers of the store nodes."""
        numbers = {**self._numbers, Kind.STORE: set(stores)}
        return [Unit(kind, number) for kind in Kind for number in sorted(numbers[kind])]

    def counts(self) -> dict[Kind, int]:
        return {kind: len(self._numbers[kind]) for kind in COUNTED}

    @property
    def num_workers(self) -> int:
        return sum(len(self._numbers[kind]) for kind in ROLES)

    def scale(self, kind: Kind, count: int) -> None:
        """Raises ConfigError for what cannot be."""
        if kind not in COUNTED:
            raise ConfigError(f"{kind} cannot be scaled; {', '.join(COUNTED)} can, and stores follow the hosts")
        if count < 1:
            raise ConfigError(f"{kind}={count}: at least 1; `down` takes the cluster away")
        conductors, gateways = self._config.conductors.count, self._config.gateways.count
        again = f"give {kind}s.count in the YAML and deploy again"
        if kind is Kind.CONDUCTOR and count > conductors:
            raise ConfigError(f"the others know addresses of {conductors} conductors: {again}")
        if kind is Kind.GATEWAY and gateways == 1 < count:
            raise ConfigError(f"a gateway that began alone does not share its port: {again}")
        numbers = self._numbers[kind]
        while len(numbers) < count:
            self.add(kind)
        while len(numbers) > count:
            numbers.discard(max(numbers))

    def add(self, kind: Kind) -> None:
        numbers = self._numbers[kind]
        numbers.add(next(n for n in range(len(numbers) + 1) if n not in numbers))

    def dismiss(self, unit: Unit) -> None:
        """This one shall leave. Raises ConfigError where that must not be."""
        if unit.kind not in COUNTED:
            raise ConfigError(f"a {unit.kind} cannot be drained: {', '.join(COUNTED)} can")
        if self._numbers[unit.kind] == {unit.number}:
            raise ConfigError(f"it is the last {unit.kind}: without one, requests fail")
        self._numbers[unit.kind].discard(unit.number)

    def to_record(self) -> dict[str, list[int]]:
        return {kind.value: sorted(numbers) for kind, numbers in self._numbers.items()}

    def restore(self, record: Mapping[str, Sequence[int]]) -> None:
        self._numbers = {Kind(kind): set(numbers) for kind, numbers in record.items()}
