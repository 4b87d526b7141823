"""Decides when a worker changes between prefill and decode, and which one. Pure.

Loads are relative to the latency targets: 1 = the target is just met. Rule: a role above the upper threshold gets a
worker of the other role if that role would stay below the lower threshold *with one worker less*, has a worker to spare
that can change, and all this has held for a while. After a correct change the giving role is below the lower threshold,
so nothing requests the way back. Does not know how workers are notified.

Loads come from the conductor's predictions and from heartbeats. Prefill need is the predicted queue ÷ the TTFT target.
Prefill use is at least the share of time with work, since an empty queue does not show how much more could be served.
While prompts are rejected for their TTFT, use counts as need too: a policy that keeps queues short by rejecting must
not look idle. Decode load is the larger of two ratios: the time that sequences add to an empty step ÷ the time that
they may add within the TBT target, and the share of blocks in use. Both spread over more workers when one joins.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moonserve.conductor.members import Instance, Members
from moonserve.protocol.errors import ConfigError
from moonserve.protocol.request import InstanceId, Role

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleThresholds:
    """Thresholds and times of role changes. Raises ConfigError for values that would oscillate."""

    # Above this, requests are soon rejected: a new placement's own work adds to the load.
    high: float = 0.7
    # Leaves room for bursts in the giving role.
    low: float = 0.5
    # Longer than a burst of arrivals, shorter than the minutes in which the mix of requests changes.
    hold_s: float = 10.0
    # A worker drains before it changes, and the effect of a change must show before the next one.
    cool_down_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high:
            raise ConfigError(f"roles: {self.low} is not above 0 and below {self.high}")
        if min(self.hold_s, self.cool_down_s) < 0:
            raise ConfigError("--role-hold-s and --role-cool-down-s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load of one worker, as input of the controller."""

    instance_id: InstanceId
    role: Role
    can_change: bool
    draining: bool
    need: float  # load relative to its target; 1 = the target is just met
    use: float  # share of its capacity in use; at least `need`


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """A worker should take this role."""

    instance_id: InstanceId
    role: Role


class RoleController:
    """Decides role changes. `decide` must be called regularly with all workers; times are monotonic seconds."""

    def __init__(self, terms: RoleThresholds) -> None:
        self._thresholds = terms
        self._wanted: Role | None = None  # the role that lacks a worker
        self._since = -math.inf  # time since which `_wanted` has its value
        self._not_before = -math.inf

    def decide(self, loads: Sequence[WorkerLoad], now: float) -> RoleChange | None:
        """Returns the change that is due now, or None. Whether it succeeds shows only in later loads."""
        wanted = _lacking(loads, self._thresholds)
        if wanted is not self._wanted:
            self._wanted, self._since = wanted, now
        if wanted is None or now < max(self._since + self._thresholds.hold_s, self._not_before):
            return None
        self._not_before = now + self._thresholds.cool_down_s
        self._wanted = None
        giver = min(_can_change(loads, _OTHER[wanted]), key=lambda load: (load.use, load.instance_id))
        return RoleChange(instance_id=giver.instance_id, role=wanted)

    def validate(self) -> None:
        assert self._wanted in (None, Role.PREFILL, Role.DECODE)
        assert self._wanted is None or self._since > -math.inf


def _lacking(loads: Sequence[WorkerLoad], terms: RoleThresholds) -> Role | None:
    """Returns the role that should get a worker. None while a worker drains, since loads without it are unknown."""
    if any(load.draining for load in loads):
        return None
    for role, other in _OTHER.items():
        helped = [load for load in loads if load.role is role]
        givers = [load for load in loads if load.role is other]
        if not helped or len(givers) < 2 or not _can_change(loads, other):
            continue
        need = sum(load.need for load in helped) / len(helped)
        left = sum(load.use for load in givers) / (len(givers) - 1)
        if need >= terms.high and left <= terms.low:
            return role
    return None


def _can_change(loads: Sequence[WorkerLoad], role: Role) -> list[WorkerLoad]:
    return [load for load in loads if load.role is role and load.can_change]


# Averaging time of the busy share; comparable to the time between two changes.
BUSY_MEMORY_S = 30.0
# How long a rejection counts as need; short, because a need must last anyway (`RoleThresholds.hold_s`).
REJECTION_MEMORY_S = 2.0


class RoleLoads:
    """Computes the load of all workers, with a running average of prefill workers' busy time. Time never goes back."""

    def __init__(self, members: Members, *, ttft_slo_s: float, tbt_slo_s: float) -> None:
        self._members = members
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s
        self._busy: dict[InstanceId, float] = {}  # share of time
        self._seen_at: float | None = None
        self._refused_at = -math.inf

    def on_rejection(self, now: float) -> None:
        """Records that a prompt was rejected for its TTFT."""
        self._refused_at = now

    def worker_loads(self, now: float) -> list[WorkerLoad]:
        """Returns the loads of all workers. Must be called regularly."""
        self._update_busy(now)
        return [self._prefill(each, now) for each in self._members.with_role(Role.PREFILL)] + [
            self._decode(each) for each in self._members.with_role(Role.DECODE)
        ]

    def _update_busy(self, now: float) -> None:
        passed_s = now - (now if self._seen_at is None else self._seen_at)
        newest = -math.expm1(-passed_s / BUSY_MEMORY_S)
        self._seen_at = now
        # A new worker counts as busy until it has shown otherwise.
        self._busy = {
            each.instance_id: (1 - newest) * self._busy.get(each.instance_id, 1.0)
            + newest * (each.queue.estimate_s(now) > 0)
            for each in self._members.with_role(Role.PREFILL)
        }

    def _prefill(self, instance: Instance, now: float) -> WorkerLoad:
        need = instance.queue.estimate_s(now) / self._ttft_slo_s
        use = max(need, self._busy[instance.instance_id])
        is_refusing = now <= self._refused_at + REJECTION_MEMORY_S
        return _load(instance, use if is_refusing else need, use)

    def _decode(self, instance: Instance) -> WorkerLoad:
        load, registration = instance.load, instance.registration
        profile = instance.decode_cost.current
        room_s = self._tbt_slo_s - profile.c0
        added_s = profile.step_s(load.num_running, load.context_tokens) - profile.c0
        # If not even an empty step meets the target, more workers do not help.
        crowding = added_s / room_s if room_s > 0 else 0.0
        num_blocks = registration.num_blocks
        taken = 1.0 - min(load.free_blocks, num_blocks) / num_blocks if num_blocks else 0.0
        need = max(crowding, taken)
        return _load(instance, need, need)

    def validate(self) -> None:
        assert all(0.0 <= share <= 1.0 for share in self._busy.values())


def _load(instance: Instance, need: float, use: float) -> WorkerLoad:
    return WorkerLoad(
        instance_id=instance.instance_id,
        role=instance.role,
        can_change=instance.registration.can_switch_role,
        draining=instance.draining,
        need=need,
        use=use,
    )
