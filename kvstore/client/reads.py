"""Finds and reads objects: at the likely nodes first, then at nodes the directory names, or at any node.

A replica that does not match its checksum is reported, counted and skipped. A node that does not answer costs a part of
the caller's time, never all of it while another node is left. A key that no node has gives None; a key that an
unreachable node may have raises an error.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from moonserve.kvstore.client.cluster import Cluster, locate_by_directory
from moonserve.kvstore.client.node_access.buffers import BufferSlots
from moonserve.kvstore.client.node_access.deadline import Deadline
from moonserve.kvstore.client.node_access.mapped_and_remote import MappedObjects
from moonserve.kvstore.client.node_access.node import ClientResources, StoreNode
from moonserve.kvstore.client.node_access.node_reads import NodeReads, keys_read, select
from moonserve.kvstore.client.node_access.objects import Block, Keys, ReadMiss
from moonserve.kvstore.client.node_access.use_reports import ClientCounters, ClientEvent
from moonserve.kvstore.client.placement import LocationHints, NodeSearch
from moonserve.kvstore.index_layout import Entry, IndexMoved
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError, PeerLost, StaleLease
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from moonserve.protocol.pb import kvstore_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")
ReadAtNode = Callable[[StoreNode, Sequence[int], Deadline], Sequence[T | ReadMiss]]
"""Reads from one node the keys at the given places of the batch."""
_REPORT_S = 1.0


class Reads:
    """Thread-safe reads over all nodes of a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        resources: ClientResources,
        at_node: NodeReads,
        hints: LocationHints,
        counters: ClientCounters,
    ) -> None:
        self._cluster = cluster
        self._resources = resources
        self._hints = hints
        self._counters = counters
        self._at_node = at_node

    def values(self, keys: Keys, deadline: Deadline, *, verify: bool) -> list[bytes | None]:
        """Returns the values. Raises PeerLost if a lost node may have a missing one; NoWorker, DeadlineExceeded."""

        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[bytes | ReadMiss]:
            return self._at_node.values(node, select(keys.stored, places), within, verify=verify)

        return self.search(keys, at, deadline)

    def into(self, keys: Keys, slots: BufferSlots, deadline: Deadline, *, verify: bool) -> list[int | None]:
        """Reads values into slots and returns the lengths. Raises as `values`, InvalidRequest if one does not fit."""
        there = self._into_at_once(keys, slots, verify=verify)
        if there is None:
            return self._search_into(keys, slots, deadline, verify=verify)
        if ReadMiss not in set(map(type, there)):  # faster than a Python loop
            return cast("list[int | None]", there)
        rest = [place for place, length in enumerate(there) if isinstance(length, ReadMiss)]
        found = self._search_into(keys.at(rest), slots.at(rest), deadline, verify=verify)
        lengths = cast("list[int | None]", there)
        for place, length in zip(rest, found, strict=True):
            lengths[place] = length
        return lengths

    def scatter(self, keys: Keys, slots: BufferSlots, deadline: Deadline) -> list[bool]:
        """Reads values into slots of several pieces, and tells which were read. Raises as `into`."""

        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[int | ReadMiss]:
            return self._at_node.scatter_or_lease(node, select(keys.stored, places), slots.at(places), within)

        return [checksum is not None for checksum in self.search(keys, at, deadline)]

    def _search_into(self, keys: Keys, slots: BufferSlots, deadline: Deadline, *, verify: bool) -> list[int | None]:
        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[int | ReadMiss]:
            there = slots.at(places)
            return self._at_node.into(node, select(keys.stored, places), there, within, verify=verify)

        return self.search(keys, at, deadline)

    def _into_at_once(self, keys: Keys, slots: BufferSlots, *, verify: bool) -> list[int | ReadMiss] | None:
        """Reads from the only node, if its memory is already mapped: no search, no waiting. Otherwise returns None.

        The per-key Python work is half of a batch's cost beyond the copy.
        """
        nodes = self._cluster.view.nodes
        near = nodes[0].near if len(nodes) == 1 else None
        if near is None:
            return None
        try:
            there = near.into(pack_keys(keys.stored), slots, verify=verify)
        except IndexMoved:
            return None
        self._at_node.report_uses(nodes[0], keys_read(keys.stored, there))
        return there

    def exist(self, keys: Keys, deadline: Deadline) -> list[bool]:
        """Tells which keys exist. Raises as `values`."""
        found = self.search(
            keys,
            lambda node, places, within: self._at_node.exist(node, select(keys.stored, places), within),
            deadline,
        )
        return [present is True for present in found]

    def value_at_once(self, block: Block, *, verify: bool, max_bytes: float = math.inf) -> bytes | ReadMiss | None:
        """Returns the value, or None if absent, without waiting and without copying much; else ASK."""

        def at(near: MappedObjects) -> bytes | ReadMiss:
            if max_bytes is not math.inf:
                entry = near.find(block.key)
                if isinstance(entry, Entry) and entry.length > max_bytes:
                    return ReadMiss.ASK_NODE
            return near.value(block.key, verify=verify)

        node, fate = self._at_once(block, at)
        if node is None or isinstance(fate, ReadMiss):
            return None if fate is ReadMiss.ABSENT else ReadMiss.ASK_NODE
        self._at_node.report_uses(node, block.key)
        return fate

    def exists_at_once(self, block: Block) -> bool | ReadMiss:
        """Tells if the key exists without waiting; else ASK."""
        node, fate = self._at_once(block, lambda near: near.exist([block.key])[0])
        if node is not None:
            self._at_node.report_uses(node, b"")
        return bool(fate) if isinstance(fate, bool) else fate

    def _at_once(
        self, block: Block, at: Callable[[MappedObjects], T | ReadMiss]
    ) -> tuple[StoreNode | None, T | ReadMiss]:
        """Looks only at the home node. Its ABSENT counts only if there is no other node."""
        view = self._cluster.view
        if not view.nodes:
            return None, ReadMiss.ASK_NODE
        [ranked] = view.ranked([block.head])
        near = ranked[0].near
        if near is None:
            return None, ReadMiss.ASK_NODE
        try:
            fate = at(near)
        except IndexMoved:
            return None, ReadMiss.ASK_NODE
        missing = fate is ReadMiss.ABSENT or fate is False
        return (ranked[0], fate) if len(ranked) == 1 or not missing else (None, ReadMiss.ASK_NODE)

    def search(self, keys: Keys, at: ReadAtNode[T], deadline: Deadline) -> list[T | None]:
        """Returns for each key the result of `at` from the first node where it is not a `ReadMiss`. Raises as
        `values`."""
        view = self._cluster.view
        if len(view.nodes) == 1:
            return self._ask_only(view.nodes[0], keys, at, deadline)
        blocks = keys.blocks()
        results: list[T | None] = [None] * len(blocks)
        search = NodeSearch(blocks, view, self._hints)
        self._ask_all(search, blocks, at, deadline, results)
        if search.unasked:
            self._find_other_holders(search, blocks, deadline)
            self._ask_all(search, blocks, at, deadline, results)
        search.raise_lost()
        return results

    def _ask_only(self, node: StoreNode, keys: Keys, at: ReadAtNode[T], deadline: Deadline) -> list[T | None]:
        """Reads from a cluster of one node, without a search."""
        try:
            fates = at(node, range(len(keys)), deadline)
        except (PeerLost, DeadlineExceeded) as error:
            if deadline.was_ample():
                node.mark_lost(error)
            raise
        if ReadMiss not in set(map(type, fates)):  # faster than a Python loop
            return cast("list[T | None]", fates)
        for key, fate in zip(keys.stored, fates, strict=True):
            if fate is ReadMiss.CORRUPT:
                self._report_corrupt(node, key)
        return [None if isinstance(fate, ReadMiss) else fate for fate in fates]

    def _ask_all(
        self,
        search: NodeSearch,
        blocks: Sequence[Block],
        at: ReadAtNode[T],
        deadline: Deadline,
        results: list[T | None],
    ) -> None:
        while groups := search.next_nodes():
            asked = [partial(self._ask, search, node, places, at, deadline) for node, places in groups.items()]
            answers = self._resources.run_concurrently(asked)
            for (node, places), fates in zip(groups.items(), answers, strict=True):
                for place, fate in zip(places, fates, strict=True):
                    if fate is ReadMiss.CORRUPT:
                        self._report_corrupt(node, blocks[place].key)
                    elif not isinstance(fate, ReadMiss):
                        results[place] = fate
                        search.found(place, node)

    def _ask(
        self,
        search: NodeSearch,
        node: StoreNode,
        places: Sequence[int],
        at: ReadAtNode[T],
        deadline: Deadline,
    ) -> Sequence[T | ReadMiss]:
        attempt = deadline.half_left() if search.others_left else deadline
        try:
            return at(node, places, attempt)
        except (PeerLost, DeadlineExceeded, StaleLease) as error:
            if attempt.was_ample() and not isinstance(error, StaleLease):
                node.mark_lost(error)
            for place in places:
                search.lost(place, error)
            self._counters.count(ClientEvent.FAILOVER)
            return [ReadMiss.ABSENT] * len(places)

    def _find_other_holders(self, search: NodeSearch, blocks: Sequence[Block], deadline: Deadline) -> None:
        view, places = self._cluster.view, search.unasked
        if not view.directory:
            search.ask_all_nodes()
            return
        keys = [blocks[place].key for place in places]
        try:
            holders = locate_by_directory(self._resources, view, keys, deadline.half_left())
        except MoonserveError as error:
            log.warning("the directory did not answer: %s", error)
            search.ask_all_nodes()
        else:
            for place, nodes in zip(places, holders, strict=True):
                search.locate(place, nodes)

    def _report_corrupt(self, node: StoreNode, key: BlockKey) -> None:
        """Counts a corrupt replica and asks its node to remove it."""
        self._counters.count(ClientEvent.CORRUPT)
        log.error("a replica at %s is corrupt: %s", node.node_id, key.hex())
        request = kvstore_pb2.StoreRemoveRequest(keys=[key], corrupt=True)
        try:
            node.call(lambda stub: stub.Remove, request, Deadline(_REPORT_S))
        except MoonserveError as error:  # not fatal: readers that verify do not use it
            log.warning("the corrupt replica could not be removed: %s", error)
