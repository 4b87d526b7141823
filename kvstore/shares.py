"""Whose objects go first: each tenant with a quota has a share of its own, all others have one together. Pure.

Within a share the eviction policy decides, one instance for the objects in memory and one for those only on disk.
Between shares it is the one that takes most for its size. Soft-pinned objects go when nothing else is on offer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.disk.base import Pin
from kvstore.eviction import EvictionPolicy
from kvstore.native.base import NO_RECORD, Record
from kvstore.stored import Tier

MAX_TENANTS = 2**16 - 1
"""More names than rows can tell apart count as no tenant."""


class Offers:
    """What may go from one tier."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._soft: dict[Record, None] = {}  # on offer and soft-pinned

    def offer(self, record: Record, pin: Pin) -> None:
        if pin is Pin.SOFT:
            self._soft[record] = None
        else:
            self.policy.offer(record)

    def withdraw(self, record: Record) -> None:
        self._soft.pop(record, None)
        self.policy.withdraw(record)

    def forget(self, record: Record) -> None:
        self._soft.pop(record, None)
        self.policy.forget(record)

    def victim(self) -> Record:
        chosen = self.policy.victim()
        return chosen if chosen != NO_RECORD else next(iter(self._soft), NO_RECORD)


@dataclass(slots=True, eq=False)
class Share:
    """The objects of one tenant with a quota, or of all without one."""

    size: int  # bytes that it may take, or is meant to
    offers: dict[Tier, Offers]
    nbytes: int = 0  # of its objects, resident or being written, however many copies they have

    def over(self) -> float:
        return self.nbytes / max(self.size, 1)


class Shares:
    """Tenants by number, and their shares."""

    def __init__(self, capacity: int, quotas: Mapping[str, int], policies: Callable[[], EvictionPolicy]) -> None:
        self._policies = policies
        self._names = [""]
        self._numbers = {"": 0}
        self._common = self._share(0)
        self._own = {name: self._share(quota) for name, quota in quotas.items()}
        self._of_number = [self._common]
        self.resize(capacity)
        for name in quotas:  # first, so that they have numbers whoever else comes
            self.number(name)

    def _share(self, size: int) -> Share:
        return Share(size, {tier: Offers(self._policies()) for tier in Tier})

    def resize(self, capacity: int) -> None:
        """All shares together are meant to take so many bytes."""
        self._common.size = max(capacity - sum(share.size for share in self._own.values()), 0)

    def number(self, tenant: str) -> int:
        """The number of a tenant, in rows."""
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

    def of(self, number: int) -> Share:
        return self._of_number[number]

    def apart(self, tenants: npt.NDArray[np.uint16]) -> Iterator[tuple[Share, npt.NDArray[np.bool_]]]:
        """The shares of these numbers, each with where its tenants are among them."""
        if not self._own:
            yield self._common, np.ones(len(tenants), np.bool_)
            return
        numbers: dict[int, list[int]] = {}
        for number in np.unique(tenants).tolist():
            numbers.setdefault(id(self.of(number)), []).append(number)
        for each in numbers.values():
            yield self.of(each[0]), np.isin(tenants, each)

    def charge(self, tenant: str, nbytes: int) -> None:
        """So many bytes more (or fewer) are the tenant's."""
        self.of(self.number(tenant)).nbytes += nbytes

    def own(self, tenant: str) -> Share | None:
        """The share of a tenant with a quota."""
        return self._own.get(tenant)

    def victim(self, tier: Tier) -> Record:
        """From the share that takes most for its size, of those that have something on offer."""
        if not self._own:
            return self._common.offers[tier].victim()
        shares = sorted((self._common, *self._own.values()), key=Share.over, reverse=True)
        return next((v for s in shares if (v := s.offers[tier].victim()) != NO_RECORD), NO_RECORD)

    def used_by_tenant(self) -> dict[str, int]:
        return {name: share.nbytes for name, share in self._own.items()}

    def all(self) -> list[Share]:
        return [self._common, *self._own.values()]

    def validate(self, objects: Iterable[tuple[str, int]]) -> None:
        """Raises AssertionError unless exactly these (tenant, bytes) are charged."""
        charged = Counter({id(share): 0 for share in self.all()})
        for tenant, nbytes in objects:
            charged[id(self.of(self.number(tenant)))] += nbytes
        assert all(share.nbytes == charged[id(share)] for share in self.all())

    @property
    def nbytes(self) -> int:
        """Memory of the policies."""
        return sum(o.policy.nbytes for share in self.all() for o in share.offers.values())
