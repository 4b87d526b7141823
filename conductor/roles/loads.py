"""The workers' loads as `controller` compares them, from the conductor's books and from heartbeats. Pure.

Prefill: the predicted queue over the TTFT target; and since an empty queue says nothing of how much could come on top,
the share of time with work counts as use. While prompts are refused for their TTFT it counts as need, too: a policy
that keeps queues short by refusing must not look as if nobody waited. Decode: what sequences add to an empty step over
what they may add within the TBT target, or the share of blocks that is taken, whichever is larger. So both are shared
out when workers are.
"""

from __future__ import annotations

import math

from conductor.members import Instance, Members
from conductor.roles.controller import WorkerLoad
from protocol.ids import InstanceId, Role

# Averages over about as long as the controller waits between two changes.
BUSY_MEMORY_S = 30.0
# A need has to last anyway before anything follows (`RoleTerms.hold_s`).
REFUSED_MEMORY_S = 2.0


class RoleLoads:
    """Remembers how busy prefill workers were; `now` never goes backwards."""

    def __init__(self, members: Members, *, ttft_slo_s: float, tbt_slo_s: float) -> None:
        self._members = members
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s
        self._busy: dict[InstanceId, float] = {}  # share of time
        self._seen_at: float | None = None
        self._refused_at = -math.inf

    def refused(self, now: float) -> None:
        """A prompt was, for its TTFT."""
        self._refused_at = now

    def at(self, now: float) -> list[WorkerLoad]:
        """Of all workers; call it regularly."""
        self._look(now)
        return [self._prefill(each, now) for each in self._members.with_role(Role.PREFILL)] + [
            self._decode(each) for each in self._members.with_role(Role.DECODE)
        ]

    def _look(self, now: float) -> None:
        passed_s = now - (now if self._seen_at is None else self._seen_at)
        newest = -math.expm1(-passed_s / BUSY_MEMORY_S)
        self._seen_at = now
        # Who is new counts as busy until it has shown otherwise.
        self._busy = {
            each.instance_id: (1 - newest) * self._busy.get(each.instance_id, 1.0)
            + newest * (each.queue.estimate_s(now) > 0)
            for each in self._members.with_role(Role.PREFILL)
        }

    def _prefill(self, instance: Instance, now: float) -> WorkerLoad:
        need = instance.queue.estimate_s(now) / self._ttft_slo_s
        use = max(need, self._busy[instance.instance_id])
        is_refusing = now <= self._refused_at + REFUSED_MEMORY_S
        return _load(instance, use if is_refusing else need, use)

    def _decode(self, instance: Instance) -> WorkerLoad:
        load, registration = instance.load, instance.registration
        profile = instance.decode_cost.current
        room_s = self._tbt_slo_s - profile.c0
        added_s = profile.step_s(load.num_running, load.context_tokens) - profile.c0
        # A target that not even an empty step meets is not met by more workers either.
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
