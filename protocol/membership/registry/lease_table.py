"""Table of members, leases and epochs of the embedded registry. Pure: `now` is an argument.

An id has at most one lease. The epochs of an id only grow, whatever epochs members claim. An expired lease is refused
and never revived. The same owner takes its id over at once; another owner must wait until the lease ends. Time never
goes backwards: a `now` below an earlier one counts as the earlier one. The module knows no callers and no watchers.
"""

import dataclasses
from dataclasses import dataclass

from moonserve.protocol.errors import StaleLease
from moonserve.protocol.membership.registry import Member, Superseded, check_join, check_ttl

MAX_ENDED = 1_000
"""Limit of ids without a lease whose last epochs are kept, since autoscaled workers use ever new ids."""


@dataclass(slots=True, eq=False)
class _Lease:
    member: Member
    expires_at: float


class LeaseTable:
    """Members and their leases. `first_epoch` should be above all epochs of earlier tables of the same cluster."""

    def __init__(self, first_epoch: int) -> None:
        self._leases: dict[str, _Lease] = {}
        self._first_epoch = first_epoch
        self._ended: dict[str, int] = {}  # the last epochs of ids without a lease
        self._now = float("-inf")
        self.version = first_epoch
        """Number that changes with `members`. It starts at `first_epoch`, so that it differs from earlier tables'."""

    def join(self, member: Member, ttl_s: float, now: float) -> Member:
        """Implements `Registry.join`."""
        check_join(member, ttl_s)
        holder = self._live(member.instance_id, now)
        if holder is not None and holder.member.owner != member.owner:
            raise held_error(holder.member.endpoint.rpc_address, member, holder.expires_at - self._now)
        last = self._ended.pop(member.instance_id, 0) if holder is None else holder.member.endpoint.epoch
        # The member's epoch may come from an earlier table.
        joined = with_epoch(member, max(self._first_epoch, last + 1, member.endpoint.epoch + 1))
        self._leases[member.instance_id] = _Lease(joined, self._now + ttl_s)
        self.version += 1
        return joined

    def renew(self, instance_id: str, epoch: int, ttl_s: float, now: float) -> None:
        """Implements `Registry.renew`."""
        check_ttl(ttl_s)
        lease = self._live(instance_id, now)
        if lease is None:
            raise ended_error(instance_id)
        if lease.member.endpoint.epoch != epoch:
            raise superseded_error(instance_id, epoch, lease.member.endpoint.epoch)
        lease.expires_at = self._now + ttl_s

    def leave(self, instance_id: str, epoch: int, now: float) -> None:
        """Implements `Registry.leave`."""
        lease = self._live(instance_id, now)
        if lease is not None and lease.member.endpoint.epoch == epoch:
            self._drop(instance_id)

    def expire(self, now: float) -> None:
        """Removes the members whose lease has ended."""
        self._advance(now)
        for instance_id in [id for id, lease in self._leases.items() if self._is_over(lease)]:
            self._drop(instance_id)

    def members(self, now: float) -> list[Member]:
        """Implements `Registry.members`."""
        self.expire(now)
        return [self._leases[instance_id].member for instance_id in sorted(self._leases)]

    @property
    def next_expiry_at(self) -> float | None:
        """Time at which the next lease ends. O(members), of which there is one per process."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def validate(self) -> None:
        """Raises AssertionError if the table contradicts itself."""
        for instance_id, lease in self._leases.items():
            assert lease.member.instance_id == instance_id, "a lease is filed under another id"
            assert lease.member.endpoint.epoch >= 0
            assert instance_id not in self._ended, "an epoch could be given twice"
        assert len(self._ended) <= MAX_ENDED

    def _live(self, instance_id: str, now: float) -> _Lease | None:
        self._advance(now)
        lease = self._leases.get(instance_id)
        if lease is None or not self._is_over(lease):
            return lease
        self._drop(instance_id)
        return None

    def _advance(self, now: float) -> None:
        self._now = max(self._now, now)

    def _is_over(self, lease: _Lease) -> bool:
        return lease.expires_at <= self._now

    def _drop(self, instance_id: str) -> None:
        self._ended[instance_id] = self._leases.pop(instance_id).member.endpoint.epoch
        self.version += 1
        if len(self._ended) > MAX_ENDED:
            # Epochs from now on are above that of the forgotten id. The id with the lowest epoch is forgotten, so that
            # an id that claimed a very high epoch does not raise those of others.
            lowest = min(self._ended, key=self._ended.__getitem__)
            self._first_epoch = max(self._first_epoch, self._ended.pop(lowest) + 1)


def with_epoch(member: Member, epoch: int) -> Member:
    return dataclasses.replace(member, endpoint=dataclasses.replace(member.endpoint, epoch=epoch))


def held_error(holder_address: str, member: Member, remaining_s: float) -> StaleLease:
    """Returns the error of a join under an id that another owner holds."""
    remaining_s = max(0.0, remaining_s)
    error = StaleLease(
        f"{member.instance_id} is held by another process at {holder_address or 'no address'}, "
        f"whose lease lasts another {remaining_s:.1f} s",
        instance_id=member.instance_id,
    )
    error.retry_after_s = remaining_s
    return error


def ended_error(instance_id: str) -> StaleLease:
    return StaleLease("the lease has ended, or the registry forgot it", instance_id=instance_id)


def superseded_error(instance_id: str, epoch: int, holder_epoch: int) -> StaleLease:
    """Returns the error of a renewal of `epoch` when `holder_epoch` holds the id.

    A lower holder means that the registry lost recent changes (a failover to a lagging replica): the lease was
    forgotten, not taken over.
    """
    if holder_epoch < epoch:
        return ended_error(instance_id)
    return Superseded(f"epoch {epoch} was taken over by epoch {holder_epoch}", instance_id=instance_id)
