"""All store nodes that the registry knows, each followed by a task of its own.

A node that the registry has not known for a while (`protocol.registry.known`) is dropped from the index; one that
comes back under another epoch or address is followed anew. Does not read events itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from kvstore.directory.follower import Follower
from kvstore.directory.index import Directory
from kvstore.replication.plans import NodeView
from protocol.ids import InstanceId
from protocol.pb import common_pb2
from protocol.registry.base import Member, Registry
from protocol.registry.known import Differences, KnownMembers
from protocol.rpc import Channels
from protocol.timer import Timer

log = logging.getLogger(__name__)

STORE_ROLE = "store"


class Following:
    """`read` is told the blocks that were read anywhere."""

    def __init__(
        self,
        directory: Directory,
        channels: Channels,
        read: Callable[[bytes], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self.counters: Counter[str] = Counter()
        self.followers: dict[InstanceId, Follower] = {}
        self._channels = channels
        self._read = read
        self._clock = clock
        self._known = KnownMembers()
        self._tasks: dict[InstanceId, asyncio.Task[None]] = {}
        self._timer = Timer(self._expire, clock)

    async def run(self, registry: Registry) -> None:
        """Follows who comes and lets go who leaves, until cancelled."""
        try:
            async for members in registry.watch():
                stores = [member for member in members if member.role == STORE_ROLE]
                self._settle(self._known.update(stores, self._clock()))
        finally:
            self._timer.set(None)
            await self._end(list(self._tasks))

    def views(self) -> dict[InstanceId, NodeView]:
        """The nodes as they are known now."""
        return {name: follower.view() for name, follower in self.followers.items()}

    def endpoint(self, instance_id: InstanceId) -> common_pb2.Endpoint | None:
        """As peers address it; None when it is not known yet, or any more."""
        follower = self.followers.get(instance_id)
        return None if follower is None else follower.endpoint

    def _expire(self) -> None:
        self._settle(self._known.expire(self._clock()))

    def _settle(self, differences: Differences) -> None:
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
        follower = Follower(
            member, self.directory, self._channels, self.counters, self._read, self._clock
        )
        self.followers[name] = follower
        self._tasks[name] = asyncio.create_task(follower.run())

    def _stop(self, name: InstanceId) -> None:
        self.followers.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def _end(self, names: Iterable[InstanceId]) -> None:
        tasks = [self._tasks[name] for name in names]
        for name in names:
            self._stop(name)
        if tasks:
            await asyncio.wait(tasks)
