"""One machine's part of the pool: its blocks in memory and on disk, in the catalog of the live store nodes. Pure.

An object is one block and takes one unit of the catalog's space. Room is made as in a store node: without a disk, the
policy's coldest block without successors is evicted. With a disk, the coldest block is written there first, and evicted
from there when the disk is full. **A block being read is held and cannot be evicted.** Every change gets a number, for
the heartbeats. Not modelled: the time of a write to disk, which delays no request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moonserve.conductor.events import BlockChanges
from moonserve.kvstore.disk.base import Place
from moonserve.kvstore.published_index import KeyIndex
from moonserve.kvstore.state.catalog import Catalog
from moonserve.kvstore.state.eviction import make
from moonserve.kvstore.state.objects import PutRequest, StoredObject, Tier, Watermarks
from moonserve.protocol.kv_blocks import NO_PARENT, BlockKey
from moonserve.protocol.request import NO_HINTS, CacheHints

UNIT = 256  # granularity of the catalog's allocator
_EVICT_WHEN_FULL = Watermarks(evict_above=1.0, evict_share=0.0)


@dataclass(frozen=True, slots=True)
class BlockLease:
    """Leading blocks of a chain that are being read, until `let_go`."""

    objects: tuple[StoredObject, ...]

    @property
    def num_on_disk(self) -> int:
        return sum(stored.tier is Tier.DISK for stored in self.objects)

    def __len__(self) -> int:
        return len(self.objects)


class _Changes:
    """Net changes since the last heartbeat, and the number of single changes. Implements `Announcements`."""

    def __init__(self) -> None:
        self.next_seq = 1
        self.first_seq = 1  # first change not yet reported
        self.added_blocks: dict[BlockKey, BlockKey] = {}  # key → parent
        self.removed_blocks: dict[BlockKey, None] = {}

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        self.next_seq += 1
        self.removed_blocks.pop(key, None)
        self.added_blocks[key] = NO_PARENT if parent is None else parent

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """No-op: the conductor does not distinguish tiers."""

    def removed(self, key: BlockKey) -> None:
        self.next_seq += 1
        self.added_blocks.pop(key, None)
        self.removed_blocks[key] = None

    def take(self) -> BlockChanges:
        changes = BlockChanges(
            first_seq=self.first_seq,
            next_seq=self.next_seq,
            added=tuple(self.added_blocks.items()),
            removed=tuple(self.removed_blocks),
        )
        self.mark_reported()
        return changes

    def mark_reported(self) -> None:
        self.first_seq = self.next_seq
        self.added_blocks.clear()
        self.removed_blocks.clear()


class _Disk:
    """Space for a number of blocks. Their places do not matter."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def space(self, length: int) -> int:
        return UNIT

    def takes(self, length: int) -> bool:
        return True

    @property
    def live_limit(self) -> int:
        return self._num_blocks * UNIT

    def release(self, place: int) -> None:
        pass


class Store:
    """The blocks of one machine."""

    def __init__(self, num_blocks: int, num_disk_blocks: int, eviction: str) -> None:
        """Raises ConfigError for an unknown eviction policy."""
        self.num_blocks = num_blocks  # capacity of its memory
        self._changes = _Changes()
        self._num_places = 0
        self._catalog = Catalog(
            num_blocks * UNIT,
            index=KeyIndex(),
            policies=lambda: make(eviction),
            announce=self._changes,
            watermarks=_EVICT_WHEN_FULL,
            disk=_Disk(num_disk_blocks) if num_disk_blocks else None,
        )
        self.num_refused = 0  # blocks without room, because all others were being read

    def __len__(self) -> int:
        return len(self._catalog)

    @property
    def num_evicted(self) -> int:
        return self._catalog.counters["evictions_succeeded"]

    @property
    def num_free(self) -> int:
        """Number of further blocks that fit into memory."""
        return self._catalog.allocator.free_bytes // UNIT

    @property
    def has_changes(self) -> bool:
        return self._changes.next_seq != self._changes.first_seq

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._catalog.present(keys)

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """Returns the number of leading blocks present, in either tier."""
        present = self._catalog.present(keys)
        return len(keys) if all(present) else present.index(False)

    def hold(self, keys: Sequence[BlockKey]) -> BlockLease:
        """Starts to read the leading blocks that are present. This counts as a use of each."""
        objects: list[StoredObject] = []
        for key in keys:
            stored = self._catalog.find(key)
            if stored is None:
                break
            self._catalog.hold(stored)
            objects.append(stored)
        self._catalog.used(reversed(objects))  # as a lease does: a chain's head is evicted last
        return BlockLease(tuple(objects))

    def let_go(self, held: BlockLease) -> None:
        """Ends a read. Blocks read from disk stay in memory if there is room."""
        for stored in held.objects:
            if stored.tier is Tier.DISK:
                self._promote(stored)
        for stored in held.objects:
            self._catalog.drop_hold(stored)

    def advance(self, now: float) -> None:
        """Sets the time, for hints."""
        self._catalog.evictor.advance(now)

    def put(self, keys: Sequence[BlockKey], first: int, hints: CacheHints = NO_HINTS) -> None:
        """Stores the blocks of a chain from position `first` on. Blocks already present stay unchanged."""
        before = keys[first - 1] if first else None
        new = keys[first:]
        for parent, key, is_here in zip((before, *new), new, self.present(new), strict=False):
            # A block may be evicted by an earlier one of this loop. It then counts as absent.
            its_hints = hints if key == keys[-1] else hints.without_return()
            if not is_here and not self._put(key, parent, its_hints):
                self.num_refused += 1
                return  # later blocks cannot be found without it

    def take_changes(self) -> BlockChanges | None:
        """Returns the changes since the last call; None = no changes."""
        return self._changes.take() if self.has_changes else None

    def snapshot(self) -> BlockChanges:
        """Returns all blocks present, which replace everything reported before."""
        self._changes.mark_reported()
        seq = self._changes.next_seq
        added = tuple((o.key, o.parent or NO_PARENT) for o in self._catalog.objects())
        return BlockChanges(first_seq=seq, next_seq=seq, added=added, snapshot=True)

    def on_disk(self) -> list[StoredObject]:
        """Returns the objects that survive the machine's death, in the order in which they were stored."""
        objects = [stored for stored in self._catalog.objects() if stored.place is not None]
        return sorted(objects, key=lambda stored: stored.generation)

    def restore(self, objects: Iterable[StoredObject]) -> None:
        """Takes over the objects that an earlier incarnation of this machine has left on its disk."""
        for stored in objects:
            stored.offset = None
            self._catalog.restore(stored)

    def _put(self, key: BlockKey, parent: BlockKey | None, hints: CacheHints) -> bool:
        self._make_room()
        stored = self._catalog.reserve(PutRequest(key=key, parent=parent, length=UNIT, hints=hints))
        if stored is None:
            return False
        self._catalog.publish(stored, checksum=0)
        return True

    def _promote(self, stored: StoredObject) -> None:
        current = self._catalog.find(stored.key)
        if current is None or current.offset is not None:
            return
        self._make_room()
        offset = self._catalog.evictor.allocate_for_copy(UNIT)
        if offset is not None:
            self._catalog.enter_memory(current, offset)

    def _make_room(self) -> None:
        """Moves the coldest block of a full memory to the disk, if there is one."""
        catalog = self._catalog
        if catalog.disk is None or catalog.allocator.free_bytes >= UNIT:
            return
        coldest = catalog.evictor.next_to_demote()
        if coldest is None:
            return
        if coldest.place is None:
            if not catalog.evictor.make_disk_space(UNIT, for_demotion=True):
                return
            self._num_places += 1
            catalog.set_disk_copy(coldest, Place(self._num_places))
        catalog.leave_memory(coldest)

    def validate(self, held: Iterable[BlockLease] = ()) -> None:
        """Raises AssertionError unless space, counts and chains agree, with exactly these reads in flight."""
        self._catalog.validate(held=[o for each in held for o in each.objects], reserved=[])
