"""Order in which nodes are searched for keys, until each key is found or known to be missing. Pure.

A key counts as missing only if no node that could have it was unreachable. The order: nodes on this host, where a
lookup costs a microsecond; the node where the key was found before, its home and the next rank; then the nodes that the
directory names or, without a directory, all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvstore.client.cluster import View, nearest
from kvstore.client.keys import Block
from kvstore.client.node import StoreNode
from protocol.errors import MoonserveError
from protocol.keys import BlockKey

_MAX_NEAR = 3
_RANKS = 2
"""The home node, and the node that takes puts when home is full, draining or away."""
Groups = Mapping[StoreNode, Sequence[int]]
"""Places of keys by the node to ask for them."""


class Hints:
    """Nodes of keys that were found away from home. All are forgotten when there are too many. Thread-safe."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._nodes: dict[BlockKey, str] = {}

    def get(self, key: BlockKey) -> str | None:
        return self._nodes.get(key)

    def note(self, key: BlockKey, node_id: str) -> None:
        if len(self._nodes) >= self._limit:
            self._nodes.clear()
        self._nodes[key] = node_id

    def forget(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self._nodes.pop(key, None)


class Search:
    """Search for a batch of keys. Call `groups`, then `found` or `lost` for each place; otherwise it is absent."""

    def __init__(self, blocks: Sequence[Block], view: View, hints: Hints) -> None:
        """Raises NoWorker if there is no node."""
        self._blocks = blocks
        self._hints = hints
        self._ranked = view.ranked([block.head for block in blocks])
        self._waiting: dict[int, list[StoreNode]] = {
            place: self._likely(block, self._ranked[place], view) for place, block in enumerate(blocks)
        }
        self._asked: dict[int, list[StoreNode]] = {place: [] for place in self._waiting}
        self._errors: dict[int, MoonserveError] = {}

    def groups(self) -> Groups:
        """Returns the nodes to ask next, with their keys; empty once all candidates were asked."""
        groups: dict[StoreNode, list[int]] = {}
        for place, candidates in self._waiting.items():
            if candidates:
                node = candidates.pop(0)
                self._asked[place].append(node)
                groups.setdefault(node, []).append(place)
        return groups

    @property
    def others_left(self) -> bool:
        """True if other nodes are left for keys that fail now, so the current attempt must leave time for them."""
        return any(len(self._asked[place]) < len(self._ranked[place]) for place in self._waiting)

    def found(self, place: int, node: StoreNode) -> None:
        del self._waiting[place]
        if node is not self._ranked[place][0]:
            self._hints.note(self._blocks[place].key, node.node_id)

    def lost(self, place: int, error: MoonserveError) -> None:
        """Notes that a node that may have the key is unreachable."""
        self._errors[place] = error

    @property
    def unasked(self) -> list[int]:
        """Places of keys that were not found and for which some nodes were not asked."""
        return [place for place in self._waiting if len(self._asked[place]) < len(self._ranked[place])]

    def locate(self, place: int, holders: Iterable[StoreNode]) -> None:
        """Sets the directory's holders as the only nodes left to ask. Without holders, drops an earlier error."""
        asked = self._asked[place]
        holders = list(holders)
        self._waiting[place] = [node for node in nearest(holders) if node not in asked]
        if not holders:
            self._errors.pop(place, None)

    def ask_everybody(self) -> None:
        """Makes all nodes not asked yet candidates."""
        for place in self.unasked:
            rest = [node for node in self._ranked[place] if node not in self._asked[place]]
            self._waiting[place] = rest

    def raise_lost(self) -> None:
        """Raises the error of a node that may have a key which was not found."""
        for place in self._waiting:
            if place in self._errors:
                raise self._errors[place]

    def _likely(self, block: Block, ranked: list[StoreNode], view: View) -> list[StoreNode]:
        if len(ranked) == 1:
            return list(ranked)
        near = [node for node in ranked if node.is_near and not node.resting][:_MAX_NEAR]
        hint = self._hints.get(block.key)
        hinted = view.by_id(hint) if hint is not None else None
        likely = [*near, *([hinted] if hinted is not None else []), *ranked[:_RANKS]]
        return list(dict.fromkeys(likely))
