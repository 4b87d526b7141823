"""Finds and reads objects: at the likely nodes first, then at nodes the directory names, or at any node.

A replica that does not match its checksum is reported, counted and skipped. A node that does not answer costs a part of
the caller's time, never all of it while another node is left. A key that no node has gives None; a key that an
unreachable node may have raises an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, cast

from kvstore.client.at_node import AtNode, pick
from kvstore.client.cluster import Cluster
from kvstore.client.deadline import Deadline
from kvstore.client.keys import Block, Keys
from kvstore.client.near import Near
from kvstore.client.node import Means, StoreNode
from kvstore.client.objects import Fate
from kvstore.client.pool import locate
from kvstore.client.reports import Counters, Event
from kvstore.client.search import Hints, Search
from kvstore.client.spots import Spots
from kvstore.native.base import Entry
from kvstore.native.layout import Retired
from protocol.errors import DeadlineExceeded, MoonserveError, PeerLost, StaleLease
from protocol.keys import BlockKey, pack_keys
from protocol.pb import kvstore_pb2

log = logging.getLogger(__name__)

T = TypeVar("T")
At = Callable[[StoreNode, Sequence[int], Deadline], Sequence[T | Fate]]
"""Reads from one node the keys at the given places of the batch."""
_REPORT_S = 1.0


class Reads:
    """Thread-safe reads over all nodes of a cluster."""

    def __init__(self, cluster: Cluster, means: Means, at_node: AtNode, hints: Hints, counters: Counters) -> None:
        self._cluster = cluster
        self._means = means
        self._hints = hints
        self._counters = counters
        self._at_node = at_node

    def values(self, keys: Keys, deadline: Deadline, *, verify: bool) -> list[bytes | None]:
        """Returns the values. Raises PeerLost if a lost node may have a missing one; NoWorker, DeadlineExceeded."""

        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[bytes | Fate]:
            return self._at_node.values(node, pick(keys.stored, places), within, verify=verify)

        return self.search(keys, at, deadline)

    def into(self, keys: Keys, spots: Spots, deadline: Deadline, *, verify: bool) -> list[int | None]:
        """Reads values into spots and returns the lengths. Raises as `values`, InvalidRequest if one does not fit."""
        there = self._into_at_once(keys, spots, verify=verify)
        if there is None:
            return self._search_into(keys, spots, deadline, verify=verify)
        if Fate not in set(map(type, there)):  # faster than a Python loop
            return cast("list[int | None]", there)
        rest = [place for place, length in enumerate(there) if isinstance(length, Fate)]
        found = self._search_into(keys.at(rest), spots.at(rest), deadline, verify=verify)
        lengths = cast("list[int | None]", there)
        for place, length in zip(rest, found, strict=True):
            lengths[place] = length
        return lengths

    def _search_into(self, keys: Keys, spots: Spots, deadline: Deadline, *, verify: bool) -> list[int | None]:
        def at(node: StoreNode, places: Sequence[int], within: Deadline) -> list[int | Fate]:
            there = spots.at(places)
            return self._at_node.into(node, pick(keys.stored, places), there, within, verify=verify)

        return self.search(keys, at, deadline)

    def _into_at_once(self, keys: Keys, spots: Spots, *, verify: bool) -> list[int | Fate] | None:
        """Reads from the only node, if its memory is already mapped: no search, no waiting. Otherwise returns None.

        The per-key Python work is half of a batch's cost beyond the copy.
        """
        nodes = self._cluster.view.nodes
        near = nodes[0].near if len(nodes) == 1 else None
        if near is None:
            return None
        packed = pack_keys(keys.stored)
        try:
            there = near.into(packed, spots, verify=verify)
        except Retired:
            return None
        if Fate in set(map(type, there)):
            read = zip(keys.stored, there, strict=True)
            packed = pack_keys([key for key, length in read if not isinstance(length, Fate)])
        self._at_node.used(nodes[0], packed)
        return there

    def exist(self, keys: Keys, deadline: Deadline) -> list[bool]:
        """Tells which keys exist. Raises as `values`."""
        found = self.search(
            keys,
            lambda node, places, within: self._at_node.exist(node, pick(keys.stored, places), within),
            deadline,
        )
        return [present is True for present in found]

    def value_at_once(self, block: Block, *, verify: bool, max_bytes: float = math.inf) -> bytes | Fate | None:
        """Returns the value, or None if absent, without waiting and without copying much; else ASK."""

        def at(near: Near) -> bytes | Fate:
            if max_bytes is not math.inf:
                entry = near.find(block.key)
                if isinstance(entry, Entry) and entry.length > max_bytes:
                    return Fate.ASK
            return near.value(block.key, verify=verify)

        node, fate = self._at_once(block, at)
        if node is None or isinstance(fate, Fate):
            return None if fate is Fate.ABSENT else Fate.ASK
        self._at_node.used(node, block.key)
        return fate

    def exists_at_once(self, block: Block) -> bool | Fate:
        """Tells if the key exists without waiting; else ASK."""
        node, fate = self._at_once(block, lambda near: near.exist([block.key])[0])
        if node is not None:
            self._at_node.used(node, b"")
        return bool(fate) if isinstance(fate, bool) else fate

    def _at_once(self, block: Block, at: Callable[[Near], T | Fate]) -> tuple[StoreNode | None, T | Fate]:
        """Looks only at the home node. Its ABSENT counts only if there is no other node."""
        view = self._cluster.view
        if not view.nodes:
            return None, Fate.ASK
        [ranked] = view.ranked([block.head])
        near = ranked[0].near
        if near is None:
            return None, Fate.ASK
        try:
            fate = at(near)
        except Retired:
            return None, Fate.ASK
        missing = fate is Fate.ABSENT or fate is False
        return (ranked[0], fate) if len(ranked) == 1 or not missing else (None, Fate.ASK)

    def search(self, keys: Keys, at: At[T], deadline: Deadline) -> list[T | None]:
        """Returns for each key the result of `at` from the first node where it is not a `Fate`. Raises as `values`."""
        view = self._cluster.view
        if len(view.nodes) == 1:
            return self._ask_only(view.nodes[0], keys, at, deadline)
        blocks = keys.blocks()
        results: list[T | None] = [None] * len(blocks)
        search = Search(blocks, view, self._hints)
        self._ask_all(search, blocks, at, deadline, results)
        if search.unasked:
            self._look_further(search, blocks, deadline)
            self._ask_all(search, blocks, at, deadline, results)
        search.raise_lost()
        return results

    def _ask_only(self, node: StoreNode, keys: Keys, at: At[T], deadline: Deadline) -> list[T | None]:
        """Reads from a cluster of one node, without a search."""
        try:
            fates = at(node, range(len(keys)), deadline)
        except (PeerLost, DeadlineExceeded) as error:
            if deadline.fair():
                node.lost(error)
            raise
        if Fate not in set(map(type, fates)):  # faster than a Python loop
            return cast("list[T | None]", fates)
        for key, fate in zip(keys.stored, fates, strict=True):
            if fate is Fate.CORRUPT:
                self._report_corrupt(node, key)
        return [None if isinstance(fate, Fate) else fate for fate in fates]

    def _ask_all(
        self,
        search: Search,
        blocks: Sequence[Block],
        at: At[T],
        deadline: Deadline,
        results: list[T | None],
    ) -> None:
        while groups := search.groups():
            asked = [partial(self._ask, search, node, places, at, deadline) for node, places in groups.items()]
            answers = self._means.together(asked)
            for (node, places), fates in zip(groups.items(), answers, strict=True):
                for place, fate in zip(places, fates, strict=True):
                    if fate is Fate.CORRUPT:
                        self._report_corrupt(node, blocks[place].key)
                    elif not isinstance(fate, Fate):
                        results[place] = fate
                        search.found(place, node)

    def _ask(
        self,
        search: Search,
        node: StoreNode,
        places: Sequence[int],
        at: At[T],
        deadline: Deadline,
    ) -> Sequence[T | Fate]:
        attempt = deadline.half() if search.others_left else deadline
        try:
            return at(node, places, attempt)
        except (PeerLost, DeadlineExceeded, StaleLease) as error:
            if attempt.fair() and not isinstance(error, StaleLease):
                node.lost(error)
            for place in places:
                search.lost(place, error)
            self._counters.count(Event.FAILOVER)
            return [Fate.ABSENT] * len(places)

    def _look_further(self, search: Search, blocks: Sequence[Block], deadline: Deadline) -> None:
        view, places = self._cluster.view, search.unasked
        if not view.directory:
            search.ask_everybody()
            return
        keys = [blocks[place].key for place in places]
        try:
            holders = locate(self._means, view, keys, deadline.half())
        except MoonserveError as error:
            log.warning("the directory was of no help: %s", error)
            search.ask_everybody()
        else:
            for place, nodes in zip(places, holders, strict=True):
                search.locate(place, nodes)

    def _report_corrupt(self, node: StoreNode, key: BlockKey) -> None:
        """Counts a corrupt replica and asks its node to remove it."""
        self._counters.count(Event.CORRUPT)
        log.error("a replica at %s is corrupt: %s", node.node_id, key.hex())
        request = kvstore_pb2.StoreRemoveRequest(keys=[key], corrupt=True)
        try:
            node.call(lambda stub: stub.Remove, request, Deadline(_REPORT_S))
        except MoonserveError as error:  # not fatal: readers that verify do not use it
            log.warning("the corrupt replica could not be removed: %s", error)
