"""Membership of an instance in the cluster: registration with the conductor, heartbeats and block events.

Block events are numbered within an epoch. A conductor that misses some (after a restart or a lost message) requests a
snapshot, so its index is soft state that can always be rebuilt from the instances.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable

from moonserve.protocol.errors import Incompatible, MoonserveError, StaleLease, Unauthenticated
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey, pack_keys
from moonserve.protocol.membership.conductor_client import ConductorClient
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.event_loop import background_task, wait_event
from moonserve.protocol.process.lifecycle import ProcessConfig
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels

log = logging.getLogger(__name__)

# A short wait after the first change gathers the changes of one engine step into one message.
GATHER_S = 0.02
RETRY_S = 0.5
CALL_TIMEOUT_S = 5.0
# Limits a message to about 2 MiB.
MAX_EVENTS = 50_000
# If more changes than this accumulate while the conductor is away, a snapshot replaces them.
MAX_PENDING = 200_000


Inventory = Callable[[], Iterable[tuple[BlockKey, BlockKey]]]
"""Function that returns (key, parent) of all blocks that an instance can serve. A chain's start has NO_PARENT."""


class BlockLog:
    """Blocks that an instance can serve, and the changes that the conductor has not acknowledged. Pure.

    `on_change` is called at each change; a Membership that reports this log sets it.
    """

    def __init__(self, inventory: Inventory | None = None) -> None:
        """`inventory` is for owners of very many blocks that can list them and report only real changes."""
        self.on_change: Callable[[], None] = lambda: None
        self._present: dict[BlockKey, BlockKey] = {}  # key → parent; unused with an inventory
        self._inventory = inventory
        self._pending: list[tuple[BlockKey, BlockKey | None]] = []  # parent None = removed
        self._next_seq = 1  # number of the first pending event
        self._snapshot_due = False  # changes were dropped, so only a snapshot is complete

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        """Records that `key` can be served from now on. `parent` is None if its chain starts here."""
        if self._inventory is not None or key not in self._present:
            if self._inventory is None:
                self._present[key] = parent or NO_PARENT
            self._record(key, parent or NO_PARENT)

    def removed(self, key: BlockKey) -> None:
        if self._inventory is not None or self._present.pop(key, None) is not None:
            self._record(key, None)

    def _record(self, key: BlockKey, parent: BlockKey | None) -> None:
        if len(self._pending) == MAX_PENDING:
            self._next_seq += len(self._pending)
            self._pending.clear()
            self._snapshot_due = True
        self._pending.append((key, parent))
        self.on_change()

    @property
    def has_changes(self) -> bool:
        return bool(self._pending)

    def changes(self) -> conductor_pb2.BlockEvents:
        """Returns the oldest pending changes, at most one per key. Call `acknowledge` when they are delivered.

        A message lists additions and removals separately, so it cannot express the order of two changes of one key.
        """
        if self._snapshot_due:
            return self.snapshot()
        events = conductor_pb2.BlockEvents(first_seq=self._next_seq)
        batch = self._leading_run()
        added = [(key, parent) for key, parent in batch if parent is not None]
        events.added_keys = pack_keys([key for key, _ in added])
        events.added_parents = pack_keys([parent for _, parent in added])
        events.removed_keys = pack_keys([key for key, parent in batch if parent is None])
        events.next_seq = self._next_seq + len(batch)
        return events

    def _leading_run(self) -> list[tuple[BlockKey, BlockKey | None]]:
        """Returns the first pending changes, up to MAX_EVENTS or the second change of a key."""
        seen: set[BlockKey] = set()
        for count, (key, _) in enumerate(self._pending):
            if key in seen or count == MAX_EVENTS:
                return self._pending[:count]
            seen.add(key)
        return self._pending[:]

    def snapshot(self) -> conductor_pb2.BlockEvents:
        """Returns all present blocks. Its acknowledgement covers all pending changes as well."""
        present = self._present if self._inventory is None else dict(self._inventory())
        return conductor_pb2.BlockEvents(
            first_seq=self._next_seq,
            added_keys=pack_keys(list(present)),
            added_parents=pack_keys(list(present.values())),
            snapshot=True,
            next_seq=self._next_seq + len(self._pending),
        )

    def acknowledge(self, events: conductor_pb2.BlockEvents) -> None:
        """Removes the changes in `events` from the pending ones, because they were delivered."""
        if events.next_seq < self._next_seq:
            return  # the changes were dropped while the message was in flight
        del self._pending[: events.next_seq - self._next_seq]
        self._next_seq = events.next_seq
        self._snapshot_due &= not events.snapshot


class Membership:
    """Keeps one instance registered. `run` must run in a task for as long as the instance serves."""

    def __init__(
        self,
        channels: Channels,
        conductor_addresses: str,
        registration: conductor_pb2.RegisterRequest,
        load: Callable[[], conductor_pb2.Load],
        block_log: BlockLog,
    ) -> None:
        self.registered = asyncio.Event()
        self.draining = False
        self._conductors = ConductorClient(channels, conductor_addresses)
        self._registration = registration
        self._load = load
        self._block_log = block_log
        self._changed = asyncio.Event()
        self._interval_s = 1.0
        block_log.on_change = self.wake

    def wake(self) -> None:
        """Triggers a heartbeat soon. Must be called in the event loop's thread."""
        self._changed.set()

    async def run(self) -> None:
        """Registers and sends heartbeats until cancelled. Raises Incompatible, StaleLease or Unauthenticated if the
        conductor refuses this instance for good."""
        while True:
            try:
                await self._register()
                while self.registered.is_set():
                    await self._wait_for_change()
                    await self._send(self._block_log.changes())
            except (Incompatible, StaleLease, Unauthenticated):
                raise
            except MoonserveError as error:
                if self.registered.is_set():
                    log.warning("conductor cannot be reached, trying again: %s", error)
                self.registered.clear()
                await asyncio.sleep(RETRY_S)

    async def deregister(self) -> None:
        """Deregisters, best effort: otherwise the lease ends the membership."""
        endpoint = self._registration.endpoint
        request = conductor_pb2.DeregisterRequest(instance_id=endpoint.instance_id, epoch=endpoint.epoch)
        try:
            await self._conductors.call(lambda c: c.Deregister, request, timeout_s=1.0)
        except MoonserveError as error:
            log.info("cannot deregister, the lease will end by itself: %s", error)

    async def _register(self) -> None:
        reply = await self._conductors.call(
            lambda conductor: conductor.Register,
            self._registration,
            timeout_s=CALL_TIMEOUT_S,
            wait_for_ready=True,
        )
        self._interval_s = reply.heartbeat_interval_s
        await self._send(self._block_log.snapshot())
        self.registered.set()

    async def _wait_for_change(self) -> None:
        if self._block_log.has_changes:
            return
        if await wait_event(self._changed, self._interval_s):
            await asyncio.sleep(GATHER_S)
            self._changed.clear()

    async def _send(self, events: conductor_pb2.BlockEvents) -> None:
        endpoint = self._registration.endpoint
        heartbeat = conductor_pb2.HeartbeatRequest(
            instance_id=endpoint.instance_id,
            epoch=endpoint.epoch,
            load=self._load(),
            events=events,
            draining=self.draining,
        )
        reply = await self._conductors.call(lambda conductor: conductor.Heartbeat, heartbeat, timeout_s=CALL_TIMEOUT_S)
        if not reply.known:
            self.registered.clear()
            return
        self._block_log.acknowledge(events)
        if reply.resync and not events.snapshot:
            await self._send(self._block_log.snapshot())


class MembershipHandle:
    """Handle on the membership of a process. Without a conductor it is empty and `drain` has no effect."""

    def __init__(self, membership: Membership | None = None, task: asyncio.Task[None] | None = None) -> None:
        self._membership = membership
        self.watched: tuple[asyncio.Task[None], ...] = () if task is None else (task,)
        """Tasks that end with an error if the conductor refuses this instance for good."""

    def drain(self, draining: bool = True) -> None:
        """Reports to the conductor that this instance refuses, or again accepts, new requests."""
        if self._membership is not None:
            self._membership.draining = draining
            self._membership.wake()


@contextlib.asynccontextmanager
async def conductor_membership(
    config: ProcessConfig,
    registration: conductor_pb2.RegisterRequest,
    load: Callable[[], conductor_pb2.Load],
    block_log: BlockLog,
) -> AsyncIterator[MembershipHandle]:
    """Keeps the instance registered with its conductor, if it has one, within the block and deregisters it after."""
    if config.conductor is None:
        yield MembershipHandle()
        return
    async with Channels(config.cluster_token, config.tls()) as channels:
        membership = Membership(channels, config.conductor, registration, load, block_log)
        try:
            async with background_task(membership.run()) as task:
                yield MembershipHandle(membership, task)
        finally:
            # Only after the heartbeats have ended: `run` registers an unknown instance again.
            await membership.deregister()


def own_endpoint(instance_id: str, *, rpc_address: str, transfer_address: str) -> Endpoint:
    """Returns the endpoint of this process. Its epoch is the current time, so that it grows with each start."""
    return Endpoint(
        instance_id=instance_id,
        epoch=time.time_ns(),
        rpc_address=rpc_address,
        transfer_address=transfer_address,
        host=host_identity(),
    )
