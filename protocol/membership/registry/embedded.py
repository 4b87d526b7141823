"""Registry inside one of the cluster's processes: lease table, clock, waiting watchers, and its gRPC service."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from moonserve.protocol.membership.registry import TTL_S, Member
from moonserve.protocol.membership.registry.lease_table import LeaseTable
from moonserve.protocol.pb import registry_pb2, registry_pb2_grpc
from moonserve.protocol.process.event_loop import Timer
from moonserve.protocol.rpc.grpc_transport import Context
from moonserve.protocol.rpc.wire import from_message, to_message


class EmbeddedRegistry:
    """Registry for use within its process, at whose end it forgets everything.

    Members notice that at their next renewal and join again. `clock` is monotonic; `wall_ns` is read once, so that
    epochs start above those of earlier processes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = LeaseTable(first_epoch=wall_ns())
        self._clock = clock
        self._changed = asyncio.Event()  # replaced at each change
        self._seen_version = self._table.version
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
        return self.current()[1]

    async def watch(self) -> AsyncIterator[list[Member]]:
        seen: int | None = None
        while True:
            seen, members = await self.wait_for_change(seen)
            yield members

    def current(self) -> tuple[int, list[Member]]:
        """Returns the version of the membership and the members."""
        members = self._table.members(self._clock())
        version = self._table.version  # read now: `_settle` may expire more leases
        self._settle()
        return version, members

    async def wait_for_change(self, seen_version: int | None) -> tuple[int, list[Member]]:
        """Waits until the version differs from `seen_version` and returns the version and the members."""
        while True:
            changed = self._changed
            version, members = self.current()
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
        if self._seen_version != self._table.version:
            self._seen_version = self._table.version
            self._changed.set()
            self._changed = asyncio.Event()


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """gRPC service `Registry`. All calls except `Watch` are answered without awaiting."""

    def __init__(self, registry: EmbeddedRegistry) -> None:
        self._registry = registry

    async def Join(self, request: registry_pb2.RegistryJoinRequest, context: Context) -> registry_pb2.RegistryJoinReply:
        member = await self._registry.join(from_message(Member, request.member), ttl_s=request.ttl_s)
        return registry_pb2.RegistryJoinReply(member=to_message(registry_pb2.Member, member))

    async def Renew(
        self, request: registry_pb2.RegistryRenewRequest, context: Context
    ) -> registry_pb2.RegistryRenewReply:
        self._registry.renew_epoch(request.instance_id, request.epoch, request.ttl_s)
        return registry_pb2.RegistryRenewReply()

    async def Leave(
        self, request: registry_pb2.RegistryLeaveRequest, context: Context
    ) -> registry_pb2.RegistryLeaveReply:
        self._registry.leave_epoch(request.instance_id, request.epoch)
        return registry_pb2.RegistryLeaveReply()

    async def Members(
        self, request: registry_pb2.RegistryMembersRequest, context: Context
    ) -> registry_pb2.RegistryMembers:
        return _members(*self._registry.current())

    async def Watch(
        self, request: registry_pb2.RegistryWatchRequest, context: Context
    ) -> AsyncIterator[registry_pb2.RegistryMembers]:
        seen = request.seen_version
        while True:
            seen, members = await self._registry.wait_for_change(seen)
            yield _members(seen, members)


def _members(version: int, members: Iterable[Member]) -> registry_pb2.RegistryMembers:
    made = [to_message(registry_pb2.Member, each) for each in members]
    return registry_pb2.RegistryMembers(version=version, members=made)
