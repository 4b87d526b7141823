"""Index of which instances hold which blocks, fed by the instances' own numbered events. No I/O.

The instances are authoritative; the index is a hint that can be lost and rebuilt from their snapshots at any time. It
serves both stores and workers' device caches.

A block's holders are bits (`kvstore.directory.block_table`), so that a prefix match over all instances is one `&` per
block.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.directory.block_table import (
    NO_SLOT,
    WORD_BITS,
    Bits,
    BlockTable,
    LeadingHolders,
    Slots,
    bits_of,
)
from moonserve.kvstore.index_layout import NO_RECORD
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, iter_keys, pack_keys
from moonserve.protocol.request import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes in one message of an instance. Keys are packed, 16 bytes each, without duplicates."""

    added: bytes = b""
    parents: bytes = b""  # of `added`; zeros if a chain starts there or the parent is known already
    removed: bytes = b""

    def check(self) -> None:
        """Raises InvalidRequest if a length is no multiple of a key's, or there is not one parent per added key."""
        whole = not len(self.added) % KEY_BYTES and not len(self.removed) % KEY_BYTES
        if not whole or len(self.parents) != len(self.added):
            raise InvalidRequest("the events do not have one parent per added key")


@dataclass(slots=True, eq=False)
class _Incarnation:
    """One incarnation of an instance."""

    epoch: int
    bit: int  # its number in the holders' columns
    next_seq: int = 1  # number of the next expected event
    num_blocks: int = 0

    @property
    def word(self) -> int:
        return self.bit // WORD_BITS

    @property
    def mask(self) -> np.uint64:
        return np.uint64(1 << self.bit % WORD_BITS)


class Directory:
    """Index of which instances hold which blocks."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self._sources: dict[InstanceId, _Incarnation] = {}
        self._instance_of: dict[int, InstanceId] = {}  # by bit

    def apply_pairs(
        self,
        instance_id: InstanceId,
        epoch: int,
        added: Iterable[tuple[BlockKey, BlockKey]],
        removed: Iterable[BlockKey],
        first_seq: int,
        next_seq: int,
        snapshot: bool,
    ) -> bool:
        """Takes in events like `apply_changes`, from (key, parent) pairs in `added`, which may repeat keys."""
        parents = dict(added)
        changes = Changes(
            added=b"".join(parents),
            parents=b"".join(parents.values()),
            removed=b"".join(removed),
        )
        return self.apply_changes(instance_id, epoch, changes, first_seq, next_seq, snapshot=snapshot)

    def apply_changes(
        self,
        instance_id: InstanceId,
        epoch: int,
        changes: Changes,
        first_seq: int,
        next_seq: int,
        *,
        snapshot: bool,
    ) -> bool:
        """Takes in the events [first_seq, next_seq) of one incarnation.

        Repeated and overlapping messages are harmless; messages of an older epoch are ignored. Returns False if events
        were missed: nothing was applied, and the caller requests a snapshot. A snapshot in pieces sets `snapshot` in
        the first piece only and has the same numbers in all. Raises InvalidRequest for malformed changes.
        """
        changes.check()
        known = self._sources.get(instance_id)
        if known is not None and epoch < known.epoch:
            return True
        source = known if known is not None and known.epoch == epoch else None
        expected = 1 if source is None else source.next_seq
        if not snapshot and first_seq > expected:
            return False
        if source is not None and next_seq < expected:
            return True
        if source is None or snapshot:
            source = self._renew(instance_id, epoch)
        self._add(source, changes)
        self._remove(source, changes.removed)
        source.next_seq = next_seq
        return True

    def drop(self, instance_id: InstanceId) -> None:
        """Forgets an instance; no-op if it is unknown. One pass over a column: O(all blocks), 1 ns each."""
        source = self._sources.pop(instance_id, None)
        if source is None:
            return
        del self._instance_of[source.bit]
        if source.num_blocks:
            self._clear(source, self.table.with_holder(source.word, source.mask))

    def next_seq(self, instance_id: InstanceId) -> int:
        """Returns the number of the next expected event of an instance; 0 if it is unknown."""
        source = self._sources.get(instance_id)
        return 0 if source is None else source.next_seq

    def epoch(self, instance_id: InstanceId) -> int:
        """Returns the epoch of an instance; 0 if it is unknown."""
        source = self._sources.get(instance_id)
        return 0 if source is None else source.epoch

    def bit(self, instance_id: InstanceId) -> int:
        """Returns the bit of a known instance in `leading`; a snapshot or a new epoch may change it."""
        return self._sources[instance_id].bit

    def leading(self, packed_keys: bytes) -> LeadingHolders:
        """Returns the holders of a chain's leading blocks, as arrays over all bits. Unused bits have runs of 0."""
        return self.table.leading(packed_keys)

    def children(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Returns the number of known children of the block in each of these rows."""
        return self.table.children[slots].astype(np.int64)

    def match(self, packed_keys: bytes) -> dict[InstanceId, int]:
        """Returns the number of leading blocks of a chain that each instance holds, without instances with none."""
        runs = self.leading(packed_keys).runs.tolist()
        return {name: runs[bit] for bit, name in self._instance_of.items() if runs[bit]}

    def holders(self, key: BlockKey) -> list[InstanceId]:
        """Returns the instances that hold a block."""
        slot = self.table.find(key)
        return [] if slot == NO_RECORD else [self._instance_of[bit] for bit in bits_of(self._held(slot))]

    def is_held(self, slot: int) -> bool:
        """Returns True if any instance holds the block in this row."""
        return self._held(slot) != 0

    def held_by(self, instance_id: InstanceId, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns a mask of the rows whose blocks an instance holds."""
        source = self._sources.get(instance_id)
        if source is None:
            return np.zeros(len(slots), np.bool_)
        held: npt.NDArray[np.bool_] = (self.table.holders[source.word][slots] & source.mask) != 0
        return held

    def num_blocks(self, instance_id: InstanceId) -> int:
        """Returns how many blocks an instance is known to hold; 0 if it is unknown."""
        source = self._sources.get(instance_id)
        return 0 if source is None else source.num_blocks

    def __len__(self) -> int:
        """Number of blocks that are held, or are parents of held blocks."""
        return len(self.table)

    def validate(self) -> None:
        """Raises AssertionError unless counts and bits match the index."""
        self.table.validate()
        rows = self.table.in_use()
        for word, column in enumerate(self.table.holders):
            known = sum(1 << n for n in range(WORD_BITS) if word * WORD_BITS + n in self._instance_of)
            assert not np.any(column[rows] & ~np.uint64(known)), "a bit of nobody"
        assert len(self._instance_of) == len(self._sources)
        for instance_id, source in self._sources.items():
            assert self._instance_of[source.bit] == instance_id
            assert _count(self.table.holders[source.word], rows, source.mask) == source.num_blocks

    def _renew(self, instance_id: InstanceId, epoch: int) -> _Incarnation:
        """Replaces an instance by a new incarnation without blocks."""
        self.drop(instance_id)
        source = _Incarnation(epoch=epoch, bit=self._free_bit())
        self._sources[instance_id] = source
        self._instance_of[source.bit] = instance_id
        return source

    def _free_bit(self) -> int:
        """Returns the lowest free bit."""
        bit = next(n for n in itertools.count() if n not in self._instance_of)
        if bit == len(self.table.holders) * WORD_BITS:
            self.table.add_holder_column()
        return bit

    def _add(self, source: _Incarnation, changes: Changes) -> None:
        if not changes.added:
            return
        slots = self.table.find_or_insert(changes.added)
        rows = np.unique(slots)
        holders = self.table.holders[source.word]
        source.num_blocks += len(rows) - _count(holders, rows, source.mask)
        holders[rows] |= source.mask
        self.table.set_parents(slots, changes.parents)

    def _remove(self, source: _Incarnation, packed_keys: bytes) -> None:
        if not packed_keys:
            return
        slots = np.unique(self.table.find_all(packed_keys))
        slots = slots[slots != NO_RECORD]
        holders = self.table.holders[source.word]
        self._clear(source, slots[(holders[slots] & source.mask) != 0])

    def _clear(self, source: _Incarnation, slots: Slots) -> None:
        """Removes an instance as the holder of these rows."""
        source.num_blocks -= len(slots)
        self.table.holders[source.word][slots] &= ~source.mask
        self.table.free_rows(slots[~self.table.is_held(slots)])

    def _held(self, slot: int) -> int:
        """Returns the holders of a row's block as bits."""
        words = enumerate(self.table.holders)
        return sum(int(column[slot]) << WORD_BITS * n for n, column in words)


def _count(column: Bits, slots: Slots, mask: np.uint64) -> int:
    return int(np.count_nonzero(column[slots] & mask))


MAX_CHAIN = 2**16
"""Blocks; more than any context has. Bounds the walk if a node announces a cycle."""


class BlockChains:
    """Queries of one directory as chains: ancestors of a block, its children on a node. It may change between calls."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._table = directory.table

    def chain_to(self, key: BlockKey) -> list[BlockKey]:
        """Returns the chain that ends with `key`, first block first, as far back as the blocks are known and held.

        Empty if no node holds `key`.
        """
        slots = self._walk(self._table.find(key))
        return list(iter_keys(self._table.keys_of(np.array(slots[::-1], np.int64))))

    def parent(self, key: BlockKey) -> BlockKey | None:
        slot = self._table.find(key)
        parent = NO_SLOT if slot == NO_RECORD else int(self._table.parents[slot])
        return None if parent == NO_SLOT else self._table.key(parent)

    def children_on(self, keys: Sequence[BlockKey], instance_id: InstanceId) -> dict[BlockKey, list[BlockKey]]:
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

    def droppable(
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
            for key, children in self.children_on(keys, node).items()
        }
        stuck = [key for key, children in followed.items() if not leaving.issuperset(children)]
        while stuck:
            key = stuck.pop()
            leaving.discard(key)
            parent = self.parent(key)
            if parent in leaving:
                stuck.append(parent)
        return sorted(leaving, key=lambda key: (-len(self.chain_to(key)), key))

    def _walk(self, slot: int) -> list[int]:
        """Returns the rows from `slot` towards the head of its chain, up to the first that is not held."""
        walked: list[int] = []
        while slot not in (NO_RECORD, NO_SLOT) and self._directory.is_held(slot):
            if len(walked) == MAX_CHAIN:
                break
            walked.append(slot)
            slot = int(self._table.parents[slot])
        return walked
