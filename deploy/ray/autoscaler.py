"""Plans the processes of a cluster, and decides when a role gets or loses a worker. Pure.

Loads are the conductor's (`conductor.role_switching`): 1 = the predicted latency just meets the target.
Rule: a role whose mean need reaches the upper threshold gets a worker. A role whose use would be at most the lower
threshold *with one worker less* loses one. Either must hold for a while, within the bounds, while no worker starts or
leaves. So under constant load, a change is never followed by its reversal. If workers can change roles, the conductor
moves them first: no worker is added while the other role could give one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moonserve.conductor.role_switching import RoleThresholds, WorkerLoad
from moonserve.deploy.launcher.process_specs import ROLES, ProcessKind
from moonserve.deploy.ray.config import ClusterConfig, ScaleTerms, Workers
from moonserve.deploy.ray.processes import PlannedProcess
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import InstanceId, Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Addition of a worker of this role, or removal of the worker `leaving` after a drain."""

    role: Role
    leaving: InstanceId | None = None


class Autoscaler:
    """Decides from the loads of all workers known to the conductor. Called regularly; times are monotonic seconds."""

    def __init__(self, terms: ScaleTerms, bounds: Mapping[Role, Workers]) -> None:
        self._terms = terms
        self._bounds = bounds
        self._pending: tuple[Role, int] | None = None  # the role, and +1 or -1
        self._since = -math.inf  # time since which the change is needed
        self._not_before = -math.inf

    def decide(self, loads: Sequence[WorkerLoad], num_wanted: int, now: float) -> Change | None:
        """Returns the change that is due now, or None. `num_wanted`: planned workers of both roles. While the conductor
        knows another number, some start or leave."""
        wanted = self._choose_change(loads, num_wanted)
        if wanted != self._pending:
            self._pending, self._since = wanted, now
        if wanted is None or now < self._not_before:
            return None
        role, step = wanted
        hold_s = self._terms.up_hold_s if step > 0 else self._terms.down_hold_s
        if now < self._since + hold_s:
            return None
        self._not_before = now + self._terms.cool_down_s
        self._pending = None
        if step > 0:
            return Change(role=role)
        least_used = min(_of(loads, role), key=lambda each: (each.use, each.instance_id))
        return Change(role=role, leaving=least_used.instance_id)

    def _choose_change(self, loads: Sequence[WorkerLoad], num_wanted: int) -> tuple[Role, int] | None:
        if len(loads) != num_wanted or any(load.draining for load in loads):
            return None
        for role in _OTHER:
            if self._needs_worker(loads, role) and not self._can_switch_worker(loads, role):
                return role, 1
        for role in _OTHER:
            if self._has_too_many(loads, role) and not self._needs_worker(loads, _OTHER[role]):
                return role, -1
        return None

    def _needs_worker(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        own = _of(loads, role)
        if not 0 < len(own) < self._bounds[role].most:
            return False
        return sum(load.need for load in own) / len(own) >= self._terms.high

    def _has_too_many(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        own = _of(loads, role)
        if len(own) <= self._bounds[role].min:
            return False
        return sum(load.use for load in own) / (len(own) - 1) <= self._terms.low

    def _can_switch_worker(self, loads: Sequence[WorkerLoad], role: Role) -> bool:
        """Returns True if the conductor can move a worker here (`conductor.role_switching`), which needs no machine."""
        givers = _of(loads, _OTHER[role])
        if len(givers) < 2 or not any(load.can_change for load in givers):
            return False
        return sum(load.use for load in givers) / (len(givers) - 1) <= RoleThresholds().low


def _of(loads: Sequence[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [load for load in loads if load.role is role]


# Kinds with a variable count. Stores follow the hosts, and there is at most one directory.
COUNTED = (ProcessKind.CONDUCTOR, ProcessKind.PREFILL, ProcessKind.DECODE, ProcessKind.GATEWAY)


class ProcessPlan:
    """Numbers of planned processes by kind. A dismissed process leaves a gap, which the next addition fills."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        counts = {
            ProcessKind.DIRECTORY: int(config.needs_directory),
            ProcessKind.CONDUCTOR: config.conductors.count,
            ProcessKind.PREFILL: config.prefill.count,
            ProcessKind.DECODE: config.decode.count,
            ProcessKind.GATEWAY: config.gateways.count,
        }
        self._numbers = {kind: set(range(count)) for kind, count in counts.items()}

    def units(self, stores: Sequence[int]) -> list[PlannedProcess]:
        """Returns all units in start order. `stores`: numbers of the store nodes."""
        numbers = {**self._numbers, ProcessKind.STORE: set(stores)}
        return [PlannedProcess(kind, number) for kind in ProcessKind for number in sorted(numbers[kind])]

    def counts(self) -> dict[ProcessKind, int]:
        return {kind: len(self._numbers[kind]) for kind in COUNTED}

    @property
    def num_workers(self) -> int:
        return sum(len(self._numbers[kind]) for kind in ROLES)

    def scale(self, kind: ProcessKind, count: int) -> None:
        """Sets the count of a kind. Raises ConfigError if that is impossible."""
        if kind not in COUNTED:
            raise ConfigError(f"{kind} cannot be scaled; {', '.join(COUNTED)} can, and stores follow the hosts")
        if count < 1:
            raise ConfigError(f"{kind}={count}: at least 1; `down` removes the cluster")
        conductors, gateways = self._config.conductors.count, self._config.gateways.count
        again = f"set {kind}s.count in the YAML and deploy again"
        if kind is ProcessKind.CONDUCTOR and count > conductors:
            raise ConfigError(f"the processes know the addresses of only {conductors} conductors: {again}")
        if kind is ProcessKind.GATEWAY and gateways == 1 < count:
            raise ConfigError(f"a gateway that started alone does not share its port: {again}")
        numbers = self._numbers[kind]
        while len(numbers) < count:
            self.add(kind)
        while len(numbers) > count:
            numbers.discard(max(numbers))

    def add(self, kind: ProcessKind) -> None:
        numbers = self._numbers[kind]
        numbers.add(next(n for n in range(len(numbers) + 1) if n not in numbers))

    def remove(self, unit: PlannedProcess) -> None:
        """Removes a unit from the plan. Raises ConfigError if it is the last of its kind, or a store or directory."""
        if unit.kind not in COUNTED:
            raise ConfigError(f"a {unit.kind} cannot be drained: {', '.join(COUNTED)} can")
        if self._numbers[unit.kind] == {unit.number}:
            raise ConfigError(f"it is the last {unit.kind}: without one, requests fail")
        self._numbers[unit.kind].discard(unit.number)

    def to_record(self) -> dict[str, list[int]]:
        return {kind.value: sorted(numbers) for kind, numbers in self._numbers.items()}

    def restore(self, record: Mapping[str, Sequence[int]]) -> None:
        self._numbers = {ProcessKind(kind): set(numbers) for kind, numbers in record.items()}
