"""Shares of tenants: decides whose objects are evicted first. Pure.

Each tenant with a quota has its own share; all others have one in common. Between shares, the one that uses most
relative to its size gives first. Within a share and tier, the classes of hints leave one after another
(`kvstore.state.eviction.retention`), and within a class the eviction policy decides: the objects that leave first have
an instance of their own. Soft-pinned objects are evicted if their share has nothing else on offer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.disk.base import Pin
from moonserve.kvstore.index_layout import NO_RECORD, Record
from moonserve.kvstore.state.eviction.base import EvictionPolicy
from moonserve.kvstore.state.eviction.retention import LeaveOrder
from moonserve.kvstore.state.objects import Tier

MAX_TENANTS = 2**16 - 1
"""Rows store 16-bit tenant numbers; names beyond this count as no tenant."""


class EvictionCandidates:
    """The objects of one share that may leave one tier."""

    def __init__(self, policies: Callable[[], EvictionPolicy]) -> None:
        self._policies = policies
        self._normal = policies()  # also ranks kept objects, which return to it
        self._first: EvictionPolicy | None = None  # made at its first use
        self._kept: dict[Record, None] = {}  # on offer, and expected
        self._soft: dict[Record, None] = {}  # on offer, and soft-pinned

    def policy(self, order: LeaveOrder) -> EvictionPolicy:
        """Returns the policy that ranks the objects of a class."""
        if order is not LeaveOrder.FIRST:
            return self._normal
        self._first = self._first or self._policies()
        return self._first

    def offer(self, record: Record, pin: Pin, order: LeaveOrder) -> None:
        if pin is Pin.SOFT:
            self._soft[record] = None
        elif order is LeaveOrder.KEPT:
            self._kept[record] = None
        else:
            self.policy(order).offer(record)

    def withdraw(self, record: Record, order: LeaveOrder) -> None:
        self._soft.pop(record, None)
        self._kept.pop(record, None)
        self.policy(order).withdraw(record)

    def forget(self, record: Record, order: LeaveOrder) -> None:
        self.withdraw(record, order)
        self.policy(order).forget(record)

    def victim(self) -> Record:
        first = NO_RECORD if self._first is None else self._first.victim()
        chosen = first if first != NO_RECORD else self._normal.victim()
        return chosen if chosen != NO_RECORD else next(chain(self._kept, self._soft), NO_RECORD)

    @property
    def nbytes(self) -> int:
        return self._normal.nbytes + (0 if self._first is None else self._first.nbytes)


@dataclass(slots=True, eq=False)
class TenantShare:
    """The objects of one tenant with a quota, or of all tenants without one."""

    size: int  # bytes: the quota; for the common share a target
    candidates: dict[Tier, EvictionCandidates]
    nbytes: int = 0  # of objects that are resident or being written, each counted once

    def overuse(self) -> float:
        return self.nbytes / max(self.size, 1)


class TenantShares:
    """The tenants of a catalog by number, and their shares."""

    def __init__(self, capacity: int, quotas: Mapping[str, int], policies: Callable[[], EvictionPolicy]) -> None:
        self._policies = policies
        self._names = [""]
        self._numbers = {"": 0}
        self._common = self._share(0)
        self._own = {name: self._share(quota) for name, quota in quotas.items()}
        self._of_number = [self._common]
        self.resize(capacity)
        for name in quotas:  # first, so that they have numbers whatever other names follow
            self.number(name)

    def _share(self, size: int) -> TenantShare:
        return TenantShare(size, {tier: EvictionCandidates(self._policies) for tier in Tier})

    def resize(self, capacity: int) -> None:
        """Sets the target size of all shares together, in bytes."""
        self._common.size = max(capacity - sum(share.size for share in self._own.values()), 0)

    def number(self, tenant: str) -> int:
        """Returns the number of a tenant; 0 (no tenant) if there are too many."""
        known = self._numbers.get(tenant)
        if known is not None:
            return known
        if len(self._names) > MAX_TENANTS:
            return 0
        self._numbers[tenant] = len(self._names)
        self._names.append(tenant)
        self._of_number.append(self._own.get(tenant, self._common))
        return len(self._names) - 1

    def name(self, number: int) -> str:
        return self._names[number]

    def share_of(self, number: int) -> TenantShare:
        return self._of_number[number]

    def split(self, tenants: npt.NDArray[np.uint16]) -> Iterator[tuple[TenantShare, npt.NDArray[np.bool_]]]:
        """Yields the shares of these tenant numbers, each with a mask of its elements."""
        if not self._own:
            yield self._common, np.ones(len(tenants), np.bool_)
            return
        numbers: dict[int, list[int]] = {}
        for number in np.unique(tenants).tolist():
            numbers.setdefault(id(self.share_of(number)), []).append(number)
        for each in numbers.values():
            yield self.share_of(each[0]), np.isin(tenants, each)

    def charge(self, tenant: str, nbytes: int) -> None:
        """Adds bytes (negative to subtract) to a tenant's share."""
        self.share_of(self.number(tenant)).nbytes += nbytes

    def share_with_quota(self, tenant: str) -> TenantShare | None:
        """Returns the share of a tenant with a quota; None for others."""
        return self._own.get(tenant)

    def victim(self, tier: Tier) -> Record:
        """Returns the next victim, from the share that uses most relative to its size and has something on offer."""
        if not self._own:
            return self._common.candidates[tier].victim()
        shares = sorted((self._common, *self._own.values()), key=TenantShare.overuse, reverse=True)
        return next((v for s in shares if (v := s.candidates[tier].victim()) != NO_RECORD), NO_RECORD)

    def used_by_tenant(self) -> dict[str, int]:
        return {name: share.nbytes for name, share in self._own.items()}

    def all(self) -> list[TenantShare]:
        return [self._common, *self._own.values()]

    def validate(self, objects: Iterable[tuple[str, int]]) -> None:
        """Raises AssertionError unless exactly these (tenant, bytes) are charged."""
        charged = Counter({id(share): 0 for share in self.all()})
        for tenant, nbytes in objects:
            charged[id(self.share_of(self.number(tenant)))] += nbytes
        assert all(share.nbytes == charged[id(share)] for share in self.all())

    @property
    def nbytes(self) -> int:
        """Memory in use by the policies."""
        return sum(each.nbytes for share in self.all() for each in share.candidates.values())
