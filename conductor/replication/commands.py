"""Having store nodes copy from each other, and let go again, as the state decides. It is told what became of a copy.

Rules: one copy into a store at a time, and so many at once in all; every call has a deadline; a failure is counted, and
the state tries elsewhere. A node that dies on either side leaves nothing behind: the one that copies gives up its own
reservation. Each call is a held task. Knows nothing of why.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from conductor.events import CopyDue, CopySettled, CopyStep, DropDue
from protocol.errors import MoonserveError
from protocol.held_tasks import HeldTasks
from protocol.ids import InstanceId
from protocol.pb import kvstore_pb2, kvstore_pb2_grpc
from protocol.rpc import Channels
from protocol.wire import endpoint_to_wire

log = logging.getLogger(__name__)

COPIES_AT_ONCE = 4
COPY_DEADLINE_S = 30.0
"""Of one step; as long as an abandoned reservation lives."""
CALL_MARGIN_S = 2.0
REMOVE_TIMEOUT_S = 5.0


class ReplicaMetrics:
    """Registered once per registry; counts blocks, and calls that failed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        self.created = counter(
            "moonserve_conductor_replicas_created", "Blocks that stores copied from each other."
        )
        self.dropped = counter(
            "moonserve_conductor_replicas_dropped", "Copies of blocks that stores let go again."
        )
        self.copies_failed = counter(
            "moonserve_conductor_copies_failed", "Copies that were not made in full."
        )
        self.drops_failed = counter(
            "moonserve_conductor_drops_failed", "Removals that stores did not answer."
        )


class ReplicaCommands:
    """Used in one event loop. `channels` are its own, and closed with it."""

    def __init__(self, channels: Channels, metrics: ReplicaMetrics) -> None:
        self._channels = channels
        self._metrics = metrics
        self._tasks = HeldTasks()
        self._slots = asyncio.Semaphore(COPIES_AT_ONCE)
        self._targets: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def copy(self, copy: CopyDue, settled: Callable[[CopySettled], object]) -> None:
        """Does not wait; `settled` is called once, unless it is closed before."""
        self._tasks.start(self._copy(copy, settled))

    def drop(self, drop: DropDue) -> None:
        """Does not wait."""
        self._tasks.start(self._drop(drop))

    async def close(self) -> None:
        await self._tasks.cancel()
        await self._channels.close()

    async def _copy(self, copy: CopyDue, settled: Callable[[CopySettled], object]) -> None:
        succeeded = False
        try:
            async with self._targets[copy.target.instance_id], self._slots:
                for step in copy.steps:
                    await self._ask_for(step, copy)
            succeeded = True
        except MoonserveError as error:
            self._metrics.copies_failed.inc()
            log.warning("a copy to %s failed: %s", copy.target.instance_id, error)
        target = InstanceId(copy.target.instance_id)
        settled(
            CopySettled(copy_id=copy.copy_id, target=target, keys=copy.keys, succeeded=succeeded)
        )

    async def _ask_for(self, step: CopyStep, copy: CopyDue) -> None:
        """Raises MoonserveError where not all of it is there afterwards."""
        request = kvstore_pb2.StoreCopyRequest(
            source=endpoint_to_wire(step.source), keys=step.keys, deadline_s=COPY_DEADLINE_S
        )
        timeout_s = COPY_DEADLINE_S + CALL_MARGIN_S
        stub = self._stub(copy.target.rpc_address)
        reply = await self._channels.call(stub.Copy, request, timeout_s=timeout_s)
        self._metrics.created.inc(reply.copied)
        if reply.copied + reply.present < len(step.keys):
            raise MoonserveError(
                f"{len(step.keys)} blocks of {step.source.instance_id}: {reply.copied} copied, "
                f"{reply.present} were there, {reply.missing} gone, {reply.refused} without room"
            )

    async def _drop(self, drop: DropDue) -> None:
        request = kvstore_pb2.StoreRemoveRequest(keys=drop.keys, keep_pinned=True)
        try:
            reply = await self._channels.call(
                self._stub(drop.store.rpc_address).Remove, request, timeout_s=REMOVE_TIMEOUT_S
            )
        except MoonserveError as error:  # eviction takes them when they are cold
            self._metrics.drops_failed.inc()
            log.warning("replicas on %s were not removed: %s", drop.store.instance_id, error)
            return
        self._metrics.dropped.inc(reply.removed)

    def _stub(self, address: str) -> kvstore_pb2_grpc.KvStoreAsyncStub:
        stub: kvstore_pb2_grpc.KvStoreAsyncStub = kvstore_pb2_grpc.KvStoreStub(
            self._channels.to(address)
        )
        return stub
