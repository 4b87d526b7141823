"""Queries the index as chains of blocks: the ancestors of a block, and its children on a node. Pure, read-only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from kvstore.directory.index import Directory
from kvstore.directory.table import NO_SLOT
from kvstore.native.base import NO_RECORD
from protocol.ids import InstanceId
from protocol.keys import BlockKey, iter_keys, pack_keys

MAX_CHAIN = 2**16
"""Blocks; more than any context has. Bounds the walk if a node announces a cycle."""


class Chains:
    """Chain queries on one directory, which may change between calls."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._table = directory.table

    def to(self, key: BlockKey) -> list[BlockKey]:
        """Returns the chain that ends with `key`, first block first, as far back as the blocks are known and held.

        Empty if no node holds `key`.
        """
        slots = self._walk(self._table.find(key))
        return list(iter_keys(self._table.keys_of(np.array(slots[::-1], np.int64))))

    def parent(self, key: BlockKey) -> BlockKey | None:
        slot = self._table.find(key)
        parent = NO_SLOT if slot == NO_RECORD else int(self._table.parents[slot])
        return None if parent == NO_SLOT else self._table.key(parent)

    def continued(self, keys: Sequence[BlockKey], instance_id: InstanceId) -> dict[BlockKey, list[BlockKey]]:
        """Returns the children of each of `keys` that an instance holds, without empty ones. O(all blocks)."""
        slots = self._table.find_all(pack_keys(keys))
        slots = slots[slots != NO_RECORD]
        rows = self._table.in_use()
        parents = self._table.parents[rows]
        followers = rows[np.isin(parents, slots[self._table.children[slots] > 0])]
        followers = followers[self._directory.held_by(instance_id, followers)]
        found: dict[BlockKey, list[BlockKey]] = {}
        for slot in followers.tolist():
            parent = self._table.key(int(self._table.parents[slot]))
            found.setdefault(parent, []).append(self._table.key(slot))
        return found

    def unfollowed(
        self,
        keys: Sequence[BlockKey],
        node: InstanceId,
        holders: Mapping[BlockKey, Collection[InstanceId]],
    ) -> list[BlockKey]:
        """Returns those of `keys` that can be dropped from `node`, children first, without leaving a child behind.

        Every child of a returned block that `node` holds is also returned, or is leaving the node by `holders`.
        """
        if not keys:
            return []
        leaving = set(keys)
        gone = {key for key, those in holders.items() if node not in those}
        followed = {
            key: [child for child in children if child not in gone]
            for key, children in self.continued(keys, node).items()
        }
        stuck = [key for key, children in followed.items() if not leaving.issuperset(children)]
        while stuck:
            key = stuck.pop()
            leaving.discard(key)
            parent = self.parent(key)
            if parent in leaving:
                stuck.append(parent)
        return sorted(leaving, key=lambda key: (-len(self.to(key)), key))

    def _walk(self, slot: int) -> list[int]:
        """Returns the rows from `slot` towards the head of its chain, up to the first that is not held."""
        walked: list[int] = []
        while slot not in (NO_RECORD, NO_SLOT) and self._directory.is_held(slot):
            if len(walked) == MAX_CHAIN:
                break
            walked.append(slot)
            slot = int(self._table.parents[slot])
        return walked
