"""Carries plans out: nodes are asked to copy from each other, or to remove; what became of it goes back to the planner.

Rules: so many copies at once and no more; every call has a deadline; a failure is counted, and the planner tries
elsewhere. A node that dies on either side leaves nothing behind: the one that copies gives up its own reservation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.replication.planner import Planner
from kvstore.replication.plans import Copy, Drop, Nodes, Plan, Step
from protocol.errors import MoonserveError, PeerLost
from protocol.ids import InstanceId
from protocol.keys import BlockKey
from protocol.pb import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from protocol.rpc import Channels

log = logging.getLogger(__name__)

PLAN_EVERY_S = 1.0
COPY_DEADLINE_S = 30.0
"""For `planner.KEYS_PER_STEP` objects; as long as an abandoned reservation lives."""
CALL_MARGIN_S = 2.0
REMOVE_TIMEOUT_S = 5.0


class Replicator:
    """`views` gives the nodes, `endpoint` where one is."""

    def __init__(
        self,
        planner: Planner,
        channels: Channels,
        views: Callable[[], Nodes],
        endpoint: Callable[[InstanceId], common_pb2.Endpoint | None],
        copies_at_once: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._planner = planner
        self._channels = channels
        self._views = views
        self._endpoint = endpoint
        self._clock = clock
        self._slots = asyncio.Semaphore(copies_at_once)

    async def run(self) -> None:
        """Follows heat until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                plan = self._planner.plan(self._views(), self._clock())
                for copy in plan.copies:
                    group.create_task(self._copy(copy))
                for drop in plan.drops:
                    group.create_task(self._drop(drop))
                await asyncio.sleep(PLAN_EVERY_S)

    async def change(self, keys: Sequence[BlockKey], num_replicas: int) -> tuple[int, int, int]:
        """How many replicas were created and dropped, and how many of the blocks nobody holds."""
        plan = self._planner.plan_change(keys, num_replicas, self._views(), self._clock())
        created, dropped = await self._carry_out(plan)
        return created, dropped, plan.missing

    async def _carry_out(self, plan: Plan) -> tuple[int, int]:
        created = await asyncio.gather(*map(self._copy, plan.copies))
        dropped = await asyncio.gather(*map(self._drop, plan.drops))
        return sum(created), sum(dropped)

    async def _copy(self, copy: Copy) -> int:
        """How many blocks are on the target now for it."""
        created, succeeded = 0, False
        try:
            async with self._slots:
                for step in copy.steps:
                    created += await self._take_step(step, copy.target)
            succeeded = True
        except MoonserveError as error:
            self.counters["copies_failed"] += 1
            log.warning("a copy to %s failed: %s", copy.target, error)
        finally:
            self._planner.settled(copy, succeeded=succeeded, now=self._clock())
        self.counters["replicas_created"] += created
        return created

    async def _take_step(self, step: Step, target: InstanceId) -> int:
        """Raises MoonserveError also when it was not done in full."""
        request = kvstore_pb2.StoreCopyRequest(
            source=self._known(step.source), keys=step.keys, deadline_s=COPY_DEADLINE_S
        )
        stub = self._stub(target)
        timeout_s = COPY_DEADLINE_S + CALL_MARGIN_S
        reply = await self._channels.call(stub.Copy, request, timeout_s=timeout_s)
        if reply.copied + reply.present < len(step.keys):
            raise MoonserveError(
                f"{len(step.keys)} blocks of {step.source}: {reply.copied} copied, "
                f"{reply.present} were there, {reply.missing} gone, {reply.refused} without room"
            )
        return reply.copied

    async def _drop(self, drop: Drop) -> int:
        request = kvstore_pb2.StoreRemoveRequest(keys=drop.keys)
        try:
            reply = await self._channels.call(
                self._stub(drop.node).Remove, request, timeout_s=REMOVE_TIMEOUT_S
            )
        except MoonserveError as error:  # eviction takes them when they are cold
            self.counters["drops_failed"] += 1
            log.warning("replicas on %s were not removed: %s", drop.node, error)
            return 0
        self.counters["replicas_dropped"] += reply.removed
        return reply.removed

    def _stub(self, node: InstanceId) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        channel = self._channels.to(self._known(node).rpc_address)
        stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(channel)
        return stub

    def _known(self, node: InstanceId) -> common_pb2.Endpoint:
        endpoint = self._endpoint(node)
        if endpoint is None:
            raise PeerLost(f"{node} is not known any more")
        return endpoint
