"""Members, their leases and their epochs, as the embedded registry keeps them. Pure: `now` is an argument.

Rules: an id has at most one lease; the epochs of an id only grow, whatever others claim; a lease that has ended is
refused, never revived; the same owner takes its id over at once, another one waits for the lease to end. Time never
runs backwards here: a `now` before an earlier one counts as that earlier one. Knows nothing of who asks or who watches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from protocol.errors import StaleLease
from protocol.registry.base import Member, Superseded, check_join, check_ttl

MAX_ENDED = 1_000
"""Ids without a lease whose last epochs are remembered; autoscaled workers take new ids for ever."""


@dataclass(slots=True, eq=False)
class _Lease:
    member: Member
    expires_at: float


class MembershipTable:
    """`first_epoch` must be above all epochs given by earlier tables of the same cluster, as far as can be known."""

    def __init__(self, first_epoch: int) -> None:
        self._leases: dict[str, _Lease] = {}
        self._first_epoch = first_epoch
        self._ended: dict[str, int] = {}  # the last epochs of ids without a lease
        self._now = float("-inf")
        self.version = first_epoch
        """Another one after each change of `members`; starts high so that it differs from an earlier table's."""

    def join(self, member: Member, ttl_s: float, now: float) -> Member:
        """As `Registry.join`."""
        check_join(member, ttl_s)
        held = self._live(member.instance_id, now)
        if held is not None and held.member.owner != member.owner:
            raise refused(held.member.endpoint.rpc_address, member, held.expires_at - self._now)
        last = self._ended.pop(member.instance_id, 0) if held is None else held.member.endpoint.epoch
        # The member's may come from an earlier table.
        epoch = max(self._first_epoch, last + 1, member.endpoint.epoch + 1)
        joined = with_epoch(member, epoch)
        self._leases[member.instance_id] = _Lease(joined, self._now + ttl_s)
        self.version += 1
        return joined

    def renew(self, instance_id: str, epoch: int, ttl_s: float, now: float) -> None:
        """As `Registry.renew`."""
        check_ttl(ttl_s)
        lease = self._live(instance_id, now)
        if lease is None:
            raise ended(instance_id)
        if lease.member.endpoint.epoch != epoch:
            raise taken_over(instance_id, epoch, lease.member.endpoint.epoch)
        lease.expires_at = self._now + ttl_s

    def leave(self, instance_id: str, epoch: int, now: float) -> None:
        """As `Registry.leave`."""
        lease = self._live(instance_id, now)
        if lease is not None and lease.member.endpoint.epoch == epoch:
            self._drop(instance_id)

    def expire(self, now: float) -> None:
        """Drops the members whose lease has ended."""
        self._pass(now)
        for instance_id in [id for id, lease in self._leases.items() if self._is_over(lease)]:
            self._drop(instance_id)

    def members(self, now: float) -> list[Member]:
        """As `Registry.members`."""
        self.expire(now)
        return [self._leases[instance_id].member for instance_id in sorted(self._leases)]

    @property
    def next_expiry_at(self) -> float | None:
        """When the first lease ends. O(members); there are as many as there are processes."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def validate(self) -> None:
        """Raises AssertionError when the table contradicts itself."""
        for instance_id, lease in self._leases.items():
            assert lease.member.instance_id == instance_id, "a lease is filed under another id"
            assert lease.member.endpoint.epoch >= 0
            assert instance_id not in self._ended, "an epoch could be given twice"
        assert len(self._ended) <= MAX_ENDED

    def _live(self, instance_id: str, now: float) -> _Lease | None:
        self._pass(now)
        lease = self._leases.get(instance_id)
        if lease is None or not self._is_over(lease):
            return lease
        self._drop(instance_id)
        return None

    def _pass(self, now: float) -> None:
        self._now = max(self._now, now)

    def _is_over(self, lease: _Lease) -> bool:
        return lease.expires_at <= self._now

    def _drop(self, instance_id: str) -> None:
        self._ended[instance_id] = self._leases.pop(instance_id).member.endpoint.epoch
        self.version += 1
        if len(self._ended) > MAX_ENDED:
            # Any epoch given from now on is above that of the forgotten id. The lowest one goes, so that an id that
            # claimed a very high epoch raises nobody else's.
            lowest = min(self._ended, key=self._ended.__getitem__)
            self._first_epoch = max(self._first_epoch, self._ended.pop(lowest) + 1)


def with_epoch(member: Member, epoch: int) -> Member:
    return dataclasses.replace(member, endpoint=dataclasses.replace(member.endpoint, epoch=epoch))


def refused(holder_address: str, member: Member, remaining_s: float) -> StaleLease:
    """For a join under an id that another owner holds."""
    remaining_s = max(0.0, remaining_s)
    error = StaleLease(
        f"{member.instance_id} is held by another process, at {holder_address or 'no address'}, "
        f"for {remaining_s:.1f} s yet unless that one renews",
        instance_id=member.instance_id,
    )
    error.retry_after_s = remaining_s
    return error


def ended(instance_id: str) -> StaleLease:
    return StaleLease("the lease has ended, or the registry forgot it", instance_id=instance_id)


def taken_over(instance_id: str, epoch: int, holder_epoch: int) -> StaleLease:
    """For a lease of `epoch` under an id that `holder_epoch` holds now.

    A lower holder means that the registry went back in time (a failover to a replica that lagged): the lease was
    forgotten, not taken.
    """
    if holder_epoch < epoch:
        return ended(instance_id)
    return Superseded(f"epoch {epoch} was taken over by epoch {holder_epoch}", instance_id=instance_id)
