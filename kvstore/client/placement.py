"""Where keys are: home nodes by weighted rendezvous hashing, and the order in which nodes are searched. Pure.

All clients that know the same nodes rank them identically for a key, without communication. A node that joins takes
over only the keys that become its own, and one that leaves gives away only its own. Placement does not know which nodes
are alive, full or near.

Source: Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996; weights as in Schindelhauer and
Schomaker, "Weighted Distributed Hash Tables", SPAA 2005 (logarithmic method).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.client.node_access.node import StoreNode
from moonserve.kvstore.client.node_access.objects import Block
from moonserve.protocol.errors import MoonserveError, NoWorker
from moonserve.protocol.kv_blocks import BlockKey, digest64, mix64, pack_keys

_FRACTION = 2.0**-53


class Placement:
    """Ranks a fixed set of nodes, given by id and weight (for example bytes of capacity; above 0)."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.ids = tuple(sorted(weights))
        self._seeds = np.array([digest64(node) for node in self.ids], np.uint64)
        self._weights = np.array([weights[node] for node in self.ids], np.float64)

    def ranked(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """Returns for each key the places in `ids` of all nodes, home first."""
        if len(self.ids) < 2:
            return [list(range(len(self.ids)))] * len(keys)
        ranks: list[list[int]] = self._scores(keys).argsort(axis=1, kind="stable").tolist()
        return ranks

    def _scores(self, keys: Sequence[BlockKey]) -> npt.NDArray[np.float64]:
        """Returns scores of shape (keys, nodes); smallest is home. Exponentially distributed: weights act as rates."""
        words = np.frombuffer(pack_keys(keys), np.dtype("<u8")).reshape(-1, 2, 1)
        mixed = mix64(mix64(words[:, 0] ^ self._seeds) ^ words[:, 1])
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * _FRACTION
        scores: npt.NDArray[np.float64] = -np.log(uniform) / self._weights
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class ClusterView:
    """Immutable snapshot of the membership."""

    nodes: tuple[StoreNode, ...] = ()
    directory: str = ""
    """host:port of the directory's gRPC service; empty = there is no directory."""
    placement: Placement = field(default_factory=lambda: Placement({}))

    @classmethod
    def of(cls, nodes: Iterable[StoreNode], directory: str = "") -> "ClusterView":
        by_id = {node.node_id: node for node in nodes}
        placement = Placement({node.node_id: node.capacity for node in by_id.values()})
        return cls(tuple(by_id[node_id] for node_id in placement.ids), directory, placement)

    def ranked(self, heads: Sequence[BlockKey]) -> list[list[StoreNode]]:
        """Returns all nodes for each chain head, home first. Raises NoWorker if there is no node."""
        if not self.nodes:
            raise NoWorker("the cluster has no store node")
        return [[self.nodes[place] for place in places] for places in self.placement.ranked(heads)]

    def by_id(self, node_id: str) -> StoreNode | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)


_MAX_NEAR = 3
_NUM_HOME_RANKS = 2
"""The home node, and the node that takes puts when home is full, draining or away."""
Groups = Mapping[StoreNode, Sequence[int]]
"""Places of keys by the node to ask for them."""


class LocationHints:
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


class NodeSearch:
    """Search for a batch of keys. Call `next_nodes`, then `found` or `lost` for each place; otherwise it is absent.

    The order: nodes on this host, where a lookup costs a microsecond; the node where the key was found before, its home
    and the next rank; then the nodes that the directory names or, without a directory, all nodes. A key counts as
    missing only if no node that could have it was unreachable.
    """

    def __init__(self, blocks: Sequence[Block], view: ClusterView, hints: LocationHints) -> None:
        """Raises NoWorker if there is no node."""
        self._blocks = blocks
        self._hints = hints
        self._ranked = view.ranked([block.head for block in blocks])
        self._waiting: dict[int, list[StoreNode]] = {
            place: self._likely(block, self._ranked[place], view) for place, block in enumerate(blocks)
        }
        self._asked: dict[int, list[StoreNode]] = {place: [] for place in self._waiting}
        self._errors: dict[int, MoonserveError] = {}

    def next_nodes(self) -> Groups:
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
        # This host's nodes first, then those with the fewest calls of this client in flight; resting nodes last.
        holders = sorted(holders, key=lambda node: (node.resting, not node.is_mapped, node.in_flight))
        self._waiting[place] = [node for node in holders if node not in asked]
        if not holders:
            self._errors.pop(place, None)

    def ask_all_nodes(self) -> None:
        """Makes all nodes not asked yet candidates."""
        for place in self.unasked:
            rest = [node for node in self._ranked[place] if node not in self._asked[place]]
            self._waiting[place] = rest

    def raise_lost(self) -> None:
        """Raises the error of a node that may have a key which was not found."""
        for place in self._waiting:
            if place in self._errors:
                raise self._errors[place]

    def _likely(self, block: Block, ranked: list[StoreNode], view: ClusterView) -> list[StoreNode]:
        if len(ranked) == 1:
            return list(ranked)
        near = [node for node in ranked if node.is_mapped and not node.resting][:_MAX_NEAR]
        hint = self._hints.get(block.key)
        hinted = view.by_id(hint) if hint is not None else None
        likely = [*near, *([hinted] if hinted is not None else []), *ranked[:_NUM_HOME_RANKS]]
        return list(dict.fromkeys(likely))
