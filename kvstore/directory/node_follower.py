"""Follows the store nodes: takes their events into the index, and polls their statistics.

Rules: after a gap in the events, another incarnation or a message that contradicts itself, the node's inventory
replaces what was known. The blocks of a node that does not answer stay in the index for as long as the registry lists
it as a member (`ClusterFollower`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

from moonserve.kvstore.directory.holders import Changes, Directory
from moonserve.kvstore.directory.replica_plans import NodeView
from moonserve.kvstore.wire import STORE_ROLE
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.membership.registry import Member, MembershipChanges, MemberView, Registry
from moonserve.protocol.pb import common_pb2, kvstore_pb2, kvstore_pb2_grpc
from moonserve.protocol.process.event_loop import Timer, background_task
from moonserve.protocol.request import InstanceId
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
STATS_EVERY_S = 2.0
STATS_TIMEOUT_S = 2.0
# A node sends a message every second (`kvstore.node.event_log`).
SILENCE_S = 5.0


class NodeFollower:
    """Follows one store node. Calls `read` with the packed keys read there; counts gaps and resyncs in `counters`."""

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
        self.stats = kvstore_pb2.StoreStatsReply()
        self._id = InstanceId(member.instance_id)
        self._directory = directory
        self._channels = channels
        self._stub = kvstore_pb2_grpc.KvStoreStub(channels.to(self.rpc_address))
        self._counters = counters
        self._read = read
        self._clock = clock
        self._is_complete = False  # True: all events up to the directory's next_seq are known

    @property
    def rpc_address(self) -> str:
        return self.member.endpoint.rpc_address

    @property
    def endpoint(self) -> common_pb2.Endpoint | None:
        """The node's endpoint for its peers; None before its first statistics."""
        if not self.stats.HasField("endpoint"):
            return None
        endpoint = common_pb2.Endpoint()
        endpoint.CopyFrom(self.stats.endpoint)
        endpoint.rpc_address = self.rpc_address
        return endpoint

    @property
    def in_step(self) -> bool:
        """True if the node's blocks are completely known and it was heard within SILENCE_S."""
        return self._is_complete and self.silence_s < SILENCE_S

    @property
    def silence_s(self) -> float:
        """Seconds since the node's last message."""
        return self._clock() - self.last_heard

    def view(self) -> NodeView:
        return NodeView(
            instance_id=self._id,
            host=self.member.endpoint.host,
            free_bytes=self.stats.free_bytes,
            capacity_bytes=self.stats.capacity_bytes,
            draining=self.stats.draining,
            in_step=self.in_step and self.stats.HasField("endpoint"),
        )

    async def run(self) -> None:
        """Follows the node until cancelled."""
        async with background_task(self._poll_stats()):
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
        except Exception:  # a bad message from one node must not affect the others
            log.exception("a message from %s cannot be applied", self._id)
            self._is_complete = False

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._events()) as messages:
            async for events in messages:
                self.last_heard = self._clock()
                self._read(events.read_keys)
                if not self._take(events):
                    self._counters["gaps"] += 1
                    log.warning("events of %s were missed: requesting its inventory", self._id)
                    return

    async def _events(self) -> AsyncGenerator[kvstore_pb2.StoreEvents, None]:
        request = kvstore_pb2.StoreSubscribeRequest()
        if self._is_complete:
            request.epoch = self._directory.epoch(self._id)
            request.next_seq = self._directory.next_seq(self._id)
        async for events in self._channels.stream(self._stub.Subscribe, request):
            yield events

    def _take(self, events: kvstore_pb2.StoreEvents) -> bool:
        """Applies a message. Returns False if earlier events were missed. Raises InvalidRequest."""
        is_another = events.epoch != self._directory.epoch(self._id)
        if events.snapshot:
            self._counters["resyncs"] += 1
            if is_another:  # its epoch may be lower if a clock was set back
                self._directory.drop(self._id)
        self._is_complete = False
        if is_another and not events.snapshot:
            return False
        taken = self._directory.apply_changes(
            self._id,
            events.epoch,
            Changes(added=events.added_keys, parents=events.added_parents, removed=events.removed_keys),
            events.first_seq,
            events.next_seq,
            snapshot=events.snapshot,
        )
        self._is_complete = taken and not events.more
        return taken

    async def _poll_stats(self) -> None:
        while True:
            try:
                request = kvstore_pb2.StoreStatsRequest()
                self.stats = await self._channels.call(self._stub.Stats, request, timeout_s=STATS_TIMEOUT_S)
            except MoonserveError as error:
                log.debug("%s did not report its state: %s", self._id, error)
            await asyncio.sleep(STATS_EVERY_S)


class ClusterFollower:
    """Follows all store nodes in the registry, each in its own task.

    Calls `read` with the packed keys that were read on any node.
    """

    def __init__(
        self,
        directory: Directory,
        channels: Channels,
        read: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.counters: Counter[str] = Counter()
        self.followers: dict[InstanceId, NodeFollower] = {}
        self._channels = channels
        self._read = read
        self._clock = clock
        self._known = MemberView()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._timer = Timer(self._expire, clock)

    async def run(self, registry: Registry) -> None:
        """Follows nodes that join and drops nodes that leave, until cancelled."""
        try:
            async for members in registry.watch():
                stores = [member for member in members if member.role == STORE_ROLE]
                self._settle(self._known.update(stores, self._clock()))
        finally:
            self._timer.set(None)
            tasks = list(self._tasks.values())
            for name in list(self._tasks):
                self._stop(name)
            if tasks:
                await asyncio.wait(tasks)

    def views(self) -> dict[InstanceId, NodeView]:
        """Returns the current view of each node."""
        return {name: follower.view() for name, follower in self.followers.items()}

    def endpoint(self, instance_id: InstanceId) -> common_pb2.Endpoint | None:
        """Returns a node's endpoint for its peers; None if it is not known."""
        follower = self.followers.get(instance_id)
        return None if follower is None else follower.endpoint

    def _expire(self) -> None:
        self._settle(self._known.expire(self._clock()))

    def _settle(self, differences: MembershipChanges) -> None:
        for member in differences.left:
            log.info("%s is gone", member.instance_id)
            self._stop(InstanceId(member.instance_id))
            self.directory.drop(InstanceId(member.instance_id))
        for member in (*differences.joined, *differences.changed):
            self._stop(InstanceId(member.instance_id))
            self._start(member)
        self._timer.set(self._known.due_at)

    def _start(self, member: Member) -> None:
        name = InstanceId(member.instance_id)
        follower = NodeFollower(member, self.directory, self._channels, self.counters, self._read, self._clock)
        self.followers[name] = follower
        self._tasks[name] = asyncio.create_task(follower.run())

    def _stop(self, name: InstanceId) -> None:
        self.followers.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
