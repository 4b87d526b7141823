"""Members, their leases and their epochs, as the embedded registry keeps them. Pure: `now` is an argument.

Rules: an id has at most one lease; epochs only grow, over all ids together; a lease that has ended is refused, never
revived; the same owner takes its id over at once, another one waits for the lease to end. Time never runs backwards
here: a `now` before an earlier one counts as that earlier one. Knows nothing of who asks or who watches.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from protocol.errors import StaleLease
from protocol.registry.base import Member, Superseded
from protocol.registry.claims import check_join, check_ttl


@dataclass(slots=True, eq=False)
class _Lease:
    member: Member
    expires_at: float


class MembershipTable:
    """`first_epoch` must be above all epochs given by earlier tables of the same cluster, as far as can be known."""

    def __init__(self, first_epoch: int) -> None:
        self._leases: dict[str, _Lease] = {}
        self._next_epoch = first_epoch
        self._now = float("-inf")
        self.version = first_epoch
        """Another one after each change of `members`; starts high so that it differs from an earlier table's."""

    def join(self, member: Member, ttl_s: float, now: float) -> Member:
        """As `Registry.join`."""
        check_join(member, ttl_s)
        held = self._live(member.instance_id, now)
        if held is not None and held.member.owner != member.owner:
            raise refused(held.member.endpoint.rpc_address, member, held.expires_at - self._now)
        # The id's own last epoch is below `_next_epoch` already; the member's may come from an earlier table.
        epoch = max(self._next_epoch, member.endpoint.epoch + 1)
        self._next_epoch = epoch + 1
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
        epochs = [lease.member.endpoint.epoch for lease in self._leases.values()]
        assert len(set(epochs)) == len(epochs), "two members share an epoch"
        assert all(epoch < self._next_epoch for epoch in epochs), "an epoch could be given twice"
        for instance_id, lease in self._leases.items():
            assert lease.member.instance_id == instance_id, "a lease is filed under another id"

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
        del self._leases[instance_id]
        self.version += 1


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
    return Superseded(
        f"epoch {epoch} was taken over by epoch {holder_epoch}", instance_id=instance_id
    )
