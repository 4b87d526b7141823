"""One store node as the directory hears it: its events into the index, what it says of itself, for as long as it is a
member.

Rules: the node is believed, not the messages: a gap, another incarnation or a message that contradicts itself begins
anew with an inventory. What was known of a node that does not answer stays; whether it is a member at all is decided
elsewhere (`kvstore.directory.following`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable

import numpy as np

from kvstore.directory.index import Changes, Directory
from kvstore.replication.plans import NodeView
from protocol.errors import MoonserveError
from protocol.ids import InstanceId
from protocol.pb import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from protocol.process import running
from protocol.registry.base import Member
from protocol.rpc import Channels

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
ASK_EVERY_S = 2.0
ASK_TIMEOUT_S = 2.0
# A node says something every second (`kvstore.subscription`).
SILENCE_S = 5.0


class Follower:
    """`read` is told the blocks that were read there; `counters` counts gaps and resyncs."""

    def __init__(
        self,
        member: Member,
        directory: Directory,
        channels: Channels,
        counters: Counter[str],
        read: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self.member = member
        self.last_heard = clock()
        self.described = kvstore_pb2.StoreDescribeReply()
        self.stats = kvstore_pb2.StoreStatsReply()
        self._id = InstanceId(member.instance_id)
        self._directory = directory
        self._channels = channels
        self._stub = kvstore_pb2_grpc.KvStoreStub(channels.to(self.rpc_address))
        self._counters = counters
        self._read = read
        self._clock = clock
        self._is_whole = False  # everything up to the directory's next_seq is known

    @property
    def rpc_address(self) -> str:
        return self.member.endpoint.rpc_address

    @property
    def endpoint(self) -> common_pb2.Endpoint | None:
        """As peers address it; None before it has said that."""
        if not self.described.HasField("endpoint"):
            return None
        endpoint = common_pb2.Endpoint()
        endpoint.CopyFrom(self.described.endpoint)
        endpoint.rpc_address = self.rpc_address
        return endpoint

    @property
    def in_step(self) -> bool:
        """What is known of it is whole and not old."""
        return self._is_whole and self.silence_s < SILENCE_S

    @property
    def silence_s(self) -> float:
        """Since its last message."""
        return self._clock() - self.last_heard

    def view(self) -> NodeView:
        return NodeView(
            instance_id=self._id,
            host=self.member.endpoint.host,
            free_bytes=self.stats.free_bytes,
            capacity_bytes=self.stats.capacity_bytes,
            draining=self.stats.draining,
            in_step=self.in_step and self.described.HasField("endpoint"),
        )

    async def run(self) -> None:
        """Follows until cancelled."""
        async with running(self._ask_for_ever()):
            retry_s = FIRST_RETRY_S
            while True:
                heard_before = self.last_heard
                await self._listen_once()
                was_heard = self.last_heard > heard_before
                retry_s = FIRST_RETRY_S if was_heard else min(retry_s * 2, LAST_RETRY_S)
                await asyncio.sleep(retry_s)

    async def _listen_once(self) -> None:
        try:
            await self._listen()
        except MoonserveError as error:
            log.info("following %s again: %s", self._id, error)
        except Exception:  # whatever one node sends, the others must still be followed
            log.exception("what %s sent could not be taken", self._id)
            self._is_whole = False

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._events()) as messages:
            async for events in messages:
                self.last_heard = self._clock()
                self._read(events.read_keys)
                if not self._take(events):
                    self._counters["gaps"] += 1
                    log.warning("events of %s were missed, asking for all it holds", self._id)
                    return

    async def _events(self) -> AsyncGenerator[kvstore_pb2.StoreEvents, None]:
        request = kvstore_pb2.StoreSubscribeRequest()
        if self._is_whole:
            request.epoch = self._directory.epoch(self._id)
            request.next_seq = self._directory.next_seq(self._id)
        async for events in self._channels.stream(self._stub.Subscribe, request):
            yield events

    def _take(self, events: kvstore_pb2.StoreEvents) -> bool:
        """False when something was missed before. Raises InvalidRequest."""
        is_another = events.epoch != self._directory.epoch(self._id)
        if events.snapshot:
            self._counters["resyncs"] += 1
            if is_another:  # a clock that was set back may have given it a lower epoch
                self._directory.drop(self._id)
        self._is_whole = False
        if is_another and not events.snapshot:
            return False
        taken = self._directory.take(
            self._id,
            events.epoch,
            _changes(events),
            events.first_seq,
            events.next_seq,
            snapshot=events.snapshot,
        )
        self._is_whole = taken and not events.more
        return taken

    async def _ask_for_ever(self) -> None:
        while True:
            try:
                await self._ask()
            except MoonserveError as error:
                log.debug("%s did not say how it is: %s", self._id, error)
            await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self) -> None:
        stats = await self._channels.call(
            self._stub.Stats, kvstore_pb2.StoreStatsRequest(), timeout_s=ASK_TIMEOUT_S
        )
        self.stats = stats
        if self.described.endpoint.epoch != stats.endpoint.epoch:
            self.described = await self._channels.call(
                self._stub.Describe, kvstore_pb2.StoreDescribeRequest(), timeout_s=ASK_TIMEOUT_S
            )


def _changes(events: kvstore_pb2.StoreEvents) -> Changes:
    tiers = np.frombuffer(events.added_tiers, np.uint8)
    return Changes(
        added=events.added_keys,
        parents=events.added_parents,
        in_memory=(tiers == kvstore_pb2.STORE_TIER_MEMORY).tobytes(),
        removed=events.removed_keys,
    )
