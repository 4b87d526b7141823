"""Carries out replication plans: has nodes copy from each other or remove replicas, and reports to the planner.

Rules: the number of concurrent copies is limited; every call has a deadline; a failure is counted, and the planner
tries another node. If either node of a copy dies, nothing is left behind: the target gives up its own reservation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

from moonserve.kvstore.directory.replica_planner import ReplicaPlanner
from moonserve.kvstore.directory.replica_plans import (
    CopyStep,
    NodeViews,
    PinnedReplicas,
    ReplicaCopy,
    ReplicaDrop,
    ReplicaPlan,
)
from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.pb import common_pb2, directory_pb2, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.request import InstanceId
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

PLAN_EVERY_S = 1.0
COPY_DEADLINE_S = 30.0
"""Deadline for `planner.KEYS_PER_STEP` objects; the same as the lifetime of an abandoned reservation."""
CALL_MARGIN_S = 2.0
REMOVE_TIMEOUT_S = 5.0
KEYS_PER_CALL = 20_000
EXISTS_TIMEOUT_S = 1.0
INDEX_WAIT_S = 5.0
"""How long the index's knowledge of a change is awaited. Events usually take about 20 ms."""
_INDEX_POLL_S = 0.02


class Replicator:
    """Carries out the plans of one planner. `views` returns the nodes, `endpoint` the address of one."""

    def __init__(
        self,
        planner: ReplicaPlanner,
        channels: Channels,
        views: Callable[[], NodeViews],
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
        """Plans and carries out replication for heat every PLAN_EVERY_S until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                pins = await self._pins(self._planner.cold_blocks(self._clock()))
                plan = self._planner.plan(self._views(), self._clock(), pins)
                for copy in plan.copies:
                    group.create_task(self._copy(copy))
                for drop in plan.drops:
                    group.create_task(self._drop(drop))
                await asyncio.sleep(PLAN_EVERY_S)

    async def set_num_replicas(self, keys: Sequence[BlockKey], num_replicas: int) -> directory_pb2.ChangeReplicaReply:
        """Sets the number of replicas of `keys`, as far as possible.

        The index lags behind the nodes, so this waits, for a short while, until it knows blocks that were just stored,
        and in the end the changes made here.
        """
        await self._wait_for_known_keys(keys)
        pins = await self._pins(keys)
        plan = self._planner.plan_change(keys, num_replicas, self._views(), self._clock(), pins)
        copied = await asyncio.gather(*map(self._copy, plan.copies))
        dropped = await asyncio.gather(*map(self._drop, plan.drops))
        await self._wait_until_indexed(plan, [sum(each) for each in copied], dropped)
        wanted = sum(len(copy.keys) for copy in plan.copies)
        return directory_pb2.ChangeReplicaReply(
            created=sum(created for created, _ in copied),
            dropped=sum(dropped),
            missing=plan.missing,
            failed=wanted - sum(created + present for created, present in copied),
        )

    async def _wait_until_indexed(self, plan: ReplicaPlan, copied: Sequence[int], dropped: Sequence[int]) -> None:
        """Waits until the index knows the copies and drops that were done in full; others are not awaited."""
        made = [
            (copy.target, copy.keys) for copy, num in zip(plan.copies, copied, strict=True) if num == len(copy.keys)
        ]
        gone = [(drop.node, drop.keys) for drop, num in zip(plan.drops, dropped, strict=True) if num == len(drop.keys)]
        await self._wait_for_index(
            lambda: (
                all(self._num_held(*each) == len(each[1]) for each in made)
                and not any(self._num_held(*each) for each in gone)
            )
        )
        for node, keys in made:
            self._planner.announced(keys, node)

    async def _wait_for_known_keys(self, keys: Sequence[BlockKey]) -> None:
        """Asks the nodes for keys that the index does not know, which may just have been stored, and waits for them."""
        known = self._held(keys)
        unknown = [key for key in keys if key not in known]
        if unknown:
            answers = await asyncio.gather(*(self._has(node, unknown) for node in self._views()))
            there = list(chain.from_iterable(each or () for each in answers))
            await self._wait_for_index(lambda: self._held(there) >= set(there))

    async def _has(self, node: InstanceId, keys: Sequence[BlockKey]) -> frozenset[BlockKey] | None:
        async def ask(piece: Sequence[BlockKey]) -> Sequence[bool]:
            request = kvstore_pb2.StoreExistsRequest(keys=piece)
            exists = self._stub(node).Exists
            return (await self._channels.call(exists, request, timeout_s=EXISTS_TIMEOUT_S)).present

        return await self._keys_with_answer(node, keys, ask)

    async def _keys_with_answer(
        self,
        node: InstanceId,
        keys: Sequence[BlockKey],
        ask: Callable[[Sequence[BlockKey]], Awaitable[Sequence[int]]],
    ) -> frozenset[BlockKey] | None:
        """Asks a node about keys, in pieces. Returns the keys with a non-zero answer; None if it did not answer."""
        found: set[BlockKey] = set()
        try:
            for begin in range(0, len(keys), KEYS_PER_CALL):
                piece = keys[begin : begin + KEYS_PER_CALL]
                told = zip(piece, await ask(piece), strict=True)
                found.update(key for key, said in told if said)
        except MoonserveError as error:
            log.warning("%s did not report its objects: %s", node, error)
            return None
        return frozenset(found)

    async def _wait_for_index(self, of_it: Callable[[], bool]) -> None:
        """Waits until the nodes' events make the condition true, for at most INDEX_WAIT_S."""
        give_up_at = self._clock() + INDEX_WAIT_S
        # Polls, since the index changes too often to notify waiters.
        while not of_it() and self._clock() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(_INDEX_POLL_S)

    def _held(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Returns those of `keys` that the index knows."""
        return set(chain.from_iterable(self._planner.holders(keys).values()))

    def _num_held(self, node: InstanceId, keys: Sequence[BlockKey]) -> int:
        """Returns how many of `keys` a node holds according to the index."""
        return len(self._planner.holders(keys).get(node, ()))

    async def _pins(self, keys: Sequence[BlockKey]) -> PinnedReplicas:
        """Asks the holders of these keys for their pins."""
        held = self._planner.holders(keys)
        answers = await asyncio.gather(*(self._pinned(node, held[node]) for node in held))
        pinned = dict(zip(held, answers, strict=True))
        return PinnedReplicas(
            pinned={node: found for node, found in pinned.items() if found is not None},
            unknown=frozenset(node for node, found in pinned.items() if found is None),
        )

    async def _pinned(self, node: InstanceId, keys: Sequence[BlockKey]) -> frozenset[BlockKey] | None:
        async def ask(piece: Sequence[BlockKey]) -> Sequence[int]:
            request = kvstore_pb2.StoreGetPinsRequest(keys=piece)
            pins = self._stub(node).GetPins
            return (await self._channels.call(pins, request, timeout_s=REMOVE_TIMEOUT_S)).pins

        return await self._keys_with_answer(node, keys, ask)

    async def _copy(self, copy: ReplicaCopy) -> tuple[int, int]:
        """Carries out a copy. Returns how many blocks were copied, and how many were on the target already."""
        created, present, succeeded = 0, 0, False
        try:
            async with self._slots:
                for step in copy.steps:
                    reply = await self._ask_for(step, copy.target)
                    created, present = created + reply.copied, present + reply.present
                    _require_complete(step, reply)
            succeeded = True
        except MoonserveError as error:
            self.counters["copies_failed"] += 1
            log.warning("a copy to %s failed: %s", copy.target, error)
        finally:
            self._planner.copy_ended(copy, succeeded=succeeded, now=self._clock())
        self.counters["replicas_created"] += created
        return created, present

    async def _ask_for(self, step: CopyStep, target: InstanceId) -> kvstore_pb2.StoreCopyReply:
        request = kvstore_pb2.StoreCopyRequest(
            source=self._known(step.source), keys=step.keys, deadline_s=COPY_DEADLINE_S
        )
        timeout_s = COPY_DEADLINE_S + CALL_MARGIN_S
        return await self._channels.call(self._stub(target).Copy, request, timeout_s=timeout_s)

    async def _drop(self, drop: ReplicaDrop) -> int:
        request = kvstore_pb2.StoreRemoveRequest(keys=drop.keys, keep_pinned=drop.keep_pinned)
        try:
            reply = await self._channels.call(self._stub(drop.node).Remove, request, timeout_s=REMOVE_TIMEOUT_S)
        except MoonserveError as error:  # eviction removes the replicas once they are cold
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


def _require_complete(step: CopyStep, reply: kvstore_pb2.StoreCopyReply) -> None:
    """Raises MoonserveError if a step was not done in full."""
    if reply.copied + reply.present < len(step.keys):
        raise MoonserveError(
            f"{len(step.keys)} blocks of {step.source}: {reply.copied} copied, "
            f"{reply.present} were there, {reply.missing} gone, {reply.refused} without room"
        )
