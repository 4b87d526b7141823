"""Registry inside one of the cluster's processes: the membership table, a clock and the waiting watchers.

It forgets everything when its process ends. Members notice that at their next renewal and join again. The module does
not know the network; `service` serves it over gRPC.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from protocol.registry.base import TTL_S, Member
from protocol.registry.table import MembershipTable
from protocol.timer import Timer


class EmbeddedRegistry:
    """Registry for use within its process. `clock` is monotonic; `wall_ns` is read once, so that epochs start above
    those of earlier processes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = MembershipTable(first_epoch=wall_ns())
        self._clock = clock
        self._changed = asyncio.Event()  # replaced at each change
        self._shown_version = self._table.version
        self._timer = Timer(self._settle, clock)

    async def join(self, member: Member, *, ttl_s: float = TTL_S) -> Member:
        try:
            return self._table.join(member, ttl_s, self._clock())
        finally:
            self._settle()

    async def renew(self, member: Member, *, ttl_s: float = TTL_S) -> None:
        self.renew_epoch(member.instance_id, member.endpoint.epoch, ttl_s)

    async def leave(self, member: Member) -> None:
        self.leave_epoch(member.instance_id, member.endpoint.epoch)

    def renew_epoch(self, instance_id: str, epoch: int, ttl_s: float) -> None:
        """Renews a lease that is given by id and epoch. Raises like `renew`."""
        try:
            self._table.renew(instance_id, epoch, ttl_s, self._clock())
        finally:
            self._settle()

    def leave_epoch(self, instance_id: str, epoch: int) -> None:
        """Ends a lease that is given by id and epoch. No-op like `leave`."""
        self._table.leave(instance_id, epoch, self._clock())
        self._settle()

    async def members(self) -> list[Member]:
        return self.now()[1]

    async def watch(self) -> AsyncIterator[list[Member]]:
        seen: int | None = None
        while True:
            seen, members = await self.after(seen)
            yield members

    def now(self) -> tuple[int, list[Member]]:
        """Returns the version of the membership and the members."""
        members = self._table.members(self._clock())
        version = self._table.version  # read now: `_settle` may expire more leases
        self._settle()
        return version, members

    async def after(self, seen_version: int | None) -> tuple[int, list[Member]]:
        """Waits until the version differs from `seen_version` and returns the version and the members."""
        while True:
            changed = self._changed
            version, members = self.now()
            if version != seen_version:
                return version, members
            await changed.wait()

    def validate(self) -> None:
        self._table.validate()

    async def close(self) -> None:
        self._timer.set(None)

    def _settle(self) -> None:
        """Expires leases, wakes the watchers if anything changed, and sets the timer for the next expiry."""
        self._table.expire(self._clock())
        self._timer.set(self._table.next_expiry_at)
        if self._shown_version != self._table.version:
            self._shown_version = self._table.version
            self._changed.set()
            self._changed = asyncio.Event()
