"""How an instance belongs to the cluster: it registers with the conductor, keeps saying that it lives, and tells which
blocks it can serve.

Block events are numbered within an epoch. Whoever misses some (a restarted conductor, a lost message) asks for a
snapshot, so the conductor's index is soft state that is always rebuilt from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable

from protocol.conductors import Conductors
from protocol.errors import Incompatible, MoonserveError, StaleLease, Unauthenticated
from protocol.keys import NO_PARENT, BlockKey, pack_keys
from protocol.machine import host_identity
from protocol.pb import conductor_pb2
from protocol.process import ProcessConfig, running
from protocol.request import Endpoint
from protocol.rpc import Channels
from protocol.timer import set_within

log = logging.getLogger(__name__)

# Waiting a little after the first change gathers the changes of one engine step into one message.
GATHER_S = 0.02
RETRY_S = 0.5
CALL_TIMEOUT_S = 5.0
# Bounds one message to about 2 MiB.
MAX_EVENTS = 50_000
# While the conductor is away, more changes than this are worth less than a snapshot.
MAX_PENDING = 200_000


Inventory = Callable[[], Iterable[tuple[BlockKey, BlockKey]]]
"""(key, parent) of all blocks that an instance can serve; the parent NO_PARENT when a chain starts there."""


class BlockLog:
    """The blocks an instance can serve, and the changes that the conductor has not acknowledged. Pure.

    `on_change` is called at each change; a Membership that tells of this log takes it over.
    """

    def __init__(self, inventory: Inventory | None = None) -> None:
        """`inventory` is for owners of very many blocks, who can list them and tell only of real changes."""
        self.on_change: Callable[[], None] = lambda: None
        self._present: dict[BlockKey, BlockKey] = {}  # key → parent, unless there is an inventory
        self._inventory = inventory
        self._pending: list[tuple[BlockKey, BlockKey | None]] = []  # parent None = removed
        self._next_seq = 1  # number of the first pending event
        self._snapshot_due = False  # changes were dropped, only a snapshot tells everything

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        """`key` can be served from now on; `parent` None when its chain starts here."""
        if self._inventory is not None or key not in self._present:
            if self._inventory is None:
                self._present[key] = parent or NO_PARENT
            self._note(key, parent or NO_PARENT)

    def removed(self, key: BlockKey) -> None:
        if self._inventory is not None or self._present.pop(key, None) is not None:
            self._note(key, None)

    def _note(self, key: BlockKey, parent: BlockKey | None) -> None:
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
        """The oldest pending changes, up to a key's second one; `acknowledge` them when delivered.

        A message lists additions and removals apart, so it could not tell the order of two changes of one key.
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
        """Pending changes in which no key occurs twice."""
        seen: set[BlockKey] = set()
        for count, (key, _) in enumerate(self._pending):
            if key in seen or count == MAX_EVENTS:
                return self._pending[:count]
            seen.add(key)
        return self._pending[:]

    def snapshot(self) -> conductor_pb2.BlockEvents:
        """Everything present; acknowledging it acknowledges all pending changes too."""
        present = self._present if self._inventory is None else dict(self._inventory())
        return conductor_pb2.BlockEvents(
            first_seq=self._next_seq,
            added_keys=pack_keys(list(present)),
            added_parents=pack_keys(list(present.values())),
            snapshot=True,
            next_seq=self._next_seq + len(self._pending),
        )

    def acknowledge(self, events: conductor_pb2.BlockEvents) -> None:
        """`events`, made here before, arrived."""
        if events.next_seq < self._next_seq:
            return  # it was under way while its changes were dropped
        del self._pending[: events.next_seq - self._next_seq]
        self._next_seq = events.next_seq
        self._snapshot_due &= not events.snapshot


class Membership:
    """Keeps one instance registered. `run` it as a held task for as long as the instance serves."""

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
        self._conductors = Conductors(channels, conductor_addresses)
        self._registration = registration
        self._load = load
        self._block_log = block_log
        self._changed = asyncio.Event()
        self._interval_s = 1.0
        block_log.on_change = self.wake

    def wake(self) -> None:
        """Something changed: tell the conductor soon. Call it in the event loop's thread."""
        self._changed.set()

    async def run(self) -> None:
        """Registers and heartbeats until cancelled. Raises Incompatible, StaleLease or Unauthenticated when the
        conductor refuses this instance for good."""
        while True:
            try:
                await self._register()
                await self._heartbeats()
            except (Incompatible, StaleLease, Unauthenticated):
                raise
            except MoonserveError as error:
                if self.registered.is_set():
                    log.warning("conductor cannot be reached, trying again: %s", error)
                self.registered.clear()
                await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Says good-bye, best effort: the lease would end the membership anyway."""
        endpoint = self._registration.endpoint
        request = conductor_pb2.DeregisterRequest(instance_id=endpoint.instance_id, epoch=endpoint.epoch)
        try:
            await self._conductors.call(lambda c: c.Deregister, request, timeout_s=1.0)
        except MoonserveError as error:
            log.info("left without a word: %s", error)

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

    async def _heartbeats(self) -> None:
        while self.registered.is_set():
            await self._wait_for_change()
            await self._send(self._block_log.changes())

    async def _wait_for_change(self) -> None:
        if self._block_log.has_changes:
            return
        if await set_within(self._changed, self._interval_s):
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


class Seat:
    """A process's place in its cluster. One without a conductor has no membership and nobody to tell."""

    def __init__(self, membership: Membership | None = None, task: asyncio.Task[None] | None = None) -> None:
        self._membership = membership
        self.watched: tuple[asyncio.Task[None], ...] = () if task is None else (task,)
        """What ends, with the reason, when the conductor refuses this instance for good."""

    def drain(self, draining: bool = True) -> None:
        """Tells the conductor to send nothing new here, or to send something again."""
        if self._membership is not None:
            self._membership.draining = draining
            self._membership.wake()


@contextlib.asynccontextmanager
async def member(
    config: ProcessConfig,
    registration: conductor_pb2.RegisterRequest,
    load: Callable[[], conductor_pb2.Load],
    block_log: BlockLog,
) -> AsyncIterator[Seat]:
    """Keeps the instance registered with its conductor, if it has one, while the block lasts; then it leaves."""
    if config.conductor is None:
        yield Seat()
        return
    channels = Channels(config.cluster_token, config.tls())
    membership = Membership(channels, config.conductor, registration, load, block_log)
    try:
        async with running(membership.run()) as task:
            yield Seat(membership, task)
    finally:
        # Not before the heartbeats have ended: one that came after would register the instance again.
        await membership.leave()
        await channels.close()


def own_endpoint(instance_id: str, *, rpc_address: str, transfer_address: str) -> Endpoint:
    """Where peers find this process. Its epoch is the time of this call, so that it grows with every start."""
    return Endpoint(
        instance_id=instance_id,
        epoch=time.time_ns(),
        rpc_address=rpc_address,
        transfer_address=transfer_address,
        host=host_identity(),
    )
