"""Fast reads and puts at store nodes for an event loop: in mapped memory, or in one round trip.

Operations that cannot be done this way are returned to the caller, which then takes a lease or a reservation
(`kvstore.client.blocks`). A node is attached on first use, and again when another incarnation has replaced it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from moonserve.kvstore.client.node_access.background import BackgroundLoop, await_despite_cancellation
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.inline_client import PUT_BYTES
from moonserve.kvstore.client.node_access.lease_and_put import PutOptions
from moonserve.kvstore.client.node_access.mapped_and_remote import RemoteObjects
from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode
from moonserve.kvstore.client.node_access.node_reads import NodeReads, keys_read
from moonserve.kvstore.client.node_access.objects import PutObject, ReadMiss
from moonserve.kvstore.client.node_access.use_reports import LAST_REPORTS_S, ClientCounters, UseReports
from moonserve.kvstore.index_layout import IndexMoved
from moonserve.kvstore.state.objects import PutOutcome
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import Endpoint
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine

T = TypeVar("T")

IN_LOOP_BYTES = 2 * 2**20
"""Largest batch handled in the event loop: a few tenths of a millisecond to copy and verify. More goes to a thread."""
_NUM_THREADS = 8
"""Concurrent calls that wait for a node; a further call waits for a thread."""


class BlocksFastPath:
    """Store nodes by id. Belongs to the event loop that runs when it is created."""

    def __init__(self, channels: Channels, engine: TransferEngine) -> None:
        background = BackgroundLoop(asyncio.get_running_loop())
        self._resources = ClientResources.over(engine, background, channels, _NUM_THREADS)
        counters = ClientCounters()
        self._touches = UseReports(self._resources.background, counters)
        self._at_node = NodeReads(self._resources, self._touches, counters)
        self._nodes: dict[str, tuple[Endpoint, StoreNode]] = {}
        """Endpoints and nodes by id; another incarnation is another node."""

    async def close(self) -> None:
        await self._touches.flush_in_loop(LAST_REPORTS_S)
        await self._resources.background.cancel_all()
        for _, node in self._nodes.values():
            node.detach_for_good()
        self._resources.threads.shutdown()
        self._resources.scratch.close()

    async def read(
        self, store: Endpoint, keys: Sequence[BlockKey], slots: BufferSlots, deadline_s: float
    ) -> list[int | ReadMiss]:
        """Reads objects into slots of several pieces, as `NodeReads.scatter`."""
        node = self._node(store)
        way = node.attachment if slots.nbytes <= IN_LOOP_BYTES else None
        if way is not None and way.mapped is not None:
            try:
                fates = way.mapped.scatter(keys, slots)
            except IndexMoved:  # attaching to the newer index takes calls
                pass
            else:
                self._at_node.report_uses(node, keys_read(keys, fates))
                return fates
        deadline = Deadline(deadline_s)
        if way is not None and way.remote is not None:
            far = await self._far(node, way.remote, keys, slots, deadline)
            if far is not None:
                return far
        return await self._ask(node, deadline, lambda: self._at_node.scatter(node, keys, slots, deadline))

    async def _far(
        self,
        node: StoreNode,
        far: RemoteObjects,
        keys: Sequence[BlockKey],
        slots: BufferSlots,
        deadline: Deadline,
    ) -> list[int | ReadMiss] | None:
        try:
            fates = await far.scatter_in_loop(keys, slots, deadline)
        except (PeerLost, DeadlineExceeded) as error:
            if deadline.was_ample():
                await await_despite_cancellation(self._in_thread(partial(node.mark_lost, error)))
            raise
        if fates is not None:
            self._at_node.report_uses(node, keys_read(keys, fates))
        return fates

    async def put(
        self, store: Endpoint, objects: Sequence[PutObject], slots: BufferSlots, deadline_s: float
    ) -> list[PutOutcome]:
        """Stores objects in one round trip. LATER for those that need a reservation."""
        node, deadline = self._node(store), Deadline(deadline_s)
        if node.near is not None or slots.nbytes > PUT_BYTES or not self._resources.offers_inline:
            return [PutOutcome.LATER] * len(objects)  # decided without a thread
        return await self._ask(node, deadline, lambda: node.put_inline(objects, slots, PutOptions(), deadline))

    async def lean_address(self, store: Endpoint, timeout_s: float) -> str:
        """Returns the lean server's address, attaching the node if needed. Raises PeerLost, DeadlineExceeded."""
        node = self._node(store)
        if node.attachment is not None:
            return node.attachment.lean_address
        deadline = Deadline(timeout_s)
        return (await self._ask(node, deadline, lambda: node.attached(deadline))).lean_address

    async def lost(self, store: Endpoint, error: MoonserveError) -> None:
        """Marks the node as not answering; it is not used until it answers again."""
        node = self._node(store)
        if not node.resting:
            await await_despite_cancellation(self._in_thread(lambda: node.mark_lost(error)))

    async def _ask(self, node: StoreNode, deadline: Deadline, call: Callable[[], T]) -> T:
        """Runs `call` in a thread. It uses the caller's memory, so it is awaited even if cancelled."""

        def ask() -> T:
            try:
                return call()
            except (PeerLost, DeadlineExceeded) as error:
                if deadline.was_ample():
                    node.mark_lost(error)
                raise

        return await await_despite_cancellation(self._in_thread(ask))

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._resources.threads, call)

    def _node(self, store: Endpoint) -> StoreNode:
        known = self._nodes.get(store.instance_id)
        if known is not None:
            endpoint, node = known
            if (endpoint.epoch, endpoint.rpc_address) == (store.epoch, store.rpc_address):
                return node
            node.detach_for_good()
        node = StoreNode(store.instance_id, store.rpc_address, self._resources)
        self._nodes[store.instance_id] = store, node
        return node
