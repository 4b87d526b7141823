"""Fast reads and puts at store nodes for an event loop: in mapped memory, or in one round trip.

Operations that cannot be done this way are returned to the caller, which then takes a lease or a reservation
(`kvstore.client.blocks`). A node is attached on first use, and again when another incarnation has replaced it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvstore.client.at_node import AtNode, used
from kvstore.client.backstage import Backstage, to_the_end
from kvstore.client.deadline import Deadline
from kvstore.client.express import PUT_BYTES
from kvstore.client.far import Far
from kvstore.client.node import Means, StoreNode
from kvstore.client.objects import Fate, PutObject
from kvstore.client.reports import LAST_REPORTS_S, Counters, Touches
from kvstore.client.rights import Terms
from kvstore.client.spots import Spots
from kvstore.native.layout import Retired
from kvstore.promises import Outcome
from protocol.errors import DeadlineExceeded, MoonserveError, PeerLost
from protocol.keys import BlockKey
from protocol.request import Endpoint
from protocol.rpc import Channels
from transfer import TransferEngine

T = TypeVar("T")

INLINE_BYTES = 2 * 2**20
"""Largest batch handled in the event loop: a few tenths of a millisecond to copy and verify. More goes to a thread."""
_NUM_THREADS = 8
"""Concurrent calls that wait for a node; a further call waits for a thread."""


class DirectNodes:
    """Store nodes by id. Belongs to the event loop that runs when it is created."""

    def __init__(self, channels: Channels, engine: TransferEngine) -> None:
        backstage = Backstage(asyncio.get_running_loop())
        self._means = Means.over(engine, backstage, channels, _NUM_THREADS)
        counters = Counters()
        self._touches = Touches(self._means.backstage, counters)
        self._at_node = AtNode(self._means, self._touches, counters)
        self._nodes: dict[str, tuple[Endpoint, StoreNode]] = {}
        """Endpoints and nodes by id; another incarnation is another node."""

    async def close(self) -> None:
        await self._touches.last(LAST_REPORTS_S)
        await self._means.backstage.end()
        for _, node in self._nodes.values():
            node.forget()
        self._means.threads.shutdown()
        self._means.scratch.close()

    async def read(
        self, store: Endpoint, keys: Sequence[BlockKey], spots: Spots, deadline_s: float
    ) -> list[int | Fate]:
        """Reads objects into spots of several pieces, as `AtNode.scatter`."""
        node = self._node(store)
        way = node.attachment if spots.nbytes <= INLINE_BYTES else None
        if way is not None and way.near is not None:
            try:
                fates = way.near.scatter(keys, spots)
            except Retired:  # attaching to the newer index takes calls
                pass
            else:
                self._at_node.used(node, used(keys, fates))
                return fates
        deadline = Deadline(deadline_s)
        if way is not None and way.far is not None:
            far = await self._far(node, way.far, keys, spots, deadline)
            if far is not None:
                return far
        return await self._ask(node, deadline, lambda: self._at_node.scatter(node, keys, spots, deadline))

    async def _far(
        self,
        node: StoreNode,
        far: Far,
        keys: Sequence[BlockKey],
        spots: Spots,
        deadline: Deadline,
    ) -> list[int | Fate] | None:
        try:
            fates = await far.scatter_in_loop(keys, spots, self._means.scratch, deadline)
        except (PeerLost, DeadlineExceeded) as error:
            if deadline.fair():
                await to_the_end(self._in_thread(partial(node.lost, error)))
            raise
        if fates is not None:
            self._at_node.used(node, used(keys, fates))
        return fates

    async def put(
        self, store: Endpoint, objects: Sequence[PutObject], spots: Spots, deadline_s: float
    ) -> list[Outcome]:
        """Stores objects in one round trip. LATER for those that need a reservation."""
        node, deadline = self._node(store), Deadline(deadline_s)
        if node.near is not None or spots.nbytes > PUT_BYTES or not self._means.express:
            return [Outcome.LATER] * len(objects)  # decided without a thread
        return await self._ask(node, deadline, lambda: node.put_at_once(objects, spots, Terms(), deadline))

    async def lean_address(self, store: Endpoint, timeout_s: float) -> str:
        """Returns the lean server's address, attaching the node if needed. Raises PeerLost, DeadlineExceeded."""
        node = self._node(store)
        if node.attachment is not None:
            return node.attachment.lean_address
        deadline = Deadline(timeout_s)
        attached = await self._ask(node, deadline, lambda: node.attached(deadline))
        return attached.lean_address

    async def lost(self, store: Endpoint, error: MoonserveError) -> None:
        """Marks the node as not answering; it is not used until it answers again."""
        node = self._node(store)
        if not node.resting:
            await to_the_end(self._in_thread(lambda: node.lost(error)))

    async def _ask(self, node: StoreNode, deadline: Deadline, call: Callable[[], T]) -> T:
        """Runs `call` in a thread. It uses the caller's memory, so it is awaited even if cancelled."""

        def ask() -> T:
            try:
                return call()
            except (PeerLost, DeadlineExceeded) as error:
                if deadline.fair():
                    node.lost(error)
                raise

        return await to_the_end(self._in_thread(ask))

    def _in_thread(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._means.threads, call)

    def _node(self, store: Endpoint) -> StoreNode:
        known = self._nodes.get(store.instance_id)
        if known is not None:
            endpoint, node = known
            if (endpoint.epoch, endpoint.rpc_address) == (store.epoch, store.rpc_address):
                return node
            node.forget()
        node = StoreNode(store.instance_id, store.rpc_address, self._means)
        self._nodes[store.instance_id] = store, node
        return node
