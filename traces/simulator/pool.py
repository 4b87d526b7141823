"""One machine's part of the pool: its blocks in memory and on disk, by the catalog that live store nodes use. Pure.

An object is one block and takes one unit of the catalog's space. Room is made as a store node makes it: without a disk
the policy's coldest block that nothing follows is evicted; with one the coldest block is written to disk first, and
evicted from there when that is full. **What is read is held, so that it cannot leave.** Every change of what is here
gets a number, for the heartbeats. Not modelled: the time that a write to the disk takes; it delays nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conductor.events import BlockChanges
from kvstore.catalog import Catalog
from kvstore.disk.base import Place
from kvstore.eviction import make
from kvstore.native.metadata import KeyIndex
from kvstore.stored import StoredObject, Tier, Watermarks, Wish
from protocol.keys import NO_PARENT, BlockKey

UNIT = 256  # the catalog's allocator gives space in multiples of this
_FOR_SPACE_ONLY = Watermarks(evict_above=1.0, evict_share=0.0)


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks of a chain that are being read; `let_go` ends it."""

    objects: tuple[StoredObject, ...]

    @property
    def num_on_disk(self) -> int:
        return sum(stored.tier is Tier.DISK for stored in self.objects)

    def __len__(self) -> int:
        return len(self.objects)


class _Changes:
    """What heartbeats have to tell: the net changes since the last one, and how many there were (Announcements)."""

    def __init__(self) -> None:
        self.next_seq = 1
        self.first_seq = 1  # of those not told
        self.added_blocks: dict[BlockKey, BlockKey] = {}  # with their parents
        self.removed_blocks: dict[BlockKey, None] = {}

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        self.next_seq += 1
        self.removed_blocks.pop(key, None)
        self.added_blocks[key] = NO_PARENT if parent is None else parent

    def moved(self, key: BlockKey, tier: Tier) -> None:
        """The conductor does not ask for the tier."""

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
        self.told()
        return changes

    def told(self) -> None:
        self.first_seq = self.next_seq
        self.added_blocks.clear()
        self.removed_blocks.clear()


class _Disk:
    """Space for so many blocks; where they lie does not matter."""

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
        self.num_blocks = num_blocks  # that its memory has room for
        self._changes = _Changes()
        self._num_places = 0
        self._catalog = Catalog(
            num_blocks * UNIT,
            index=KeyIndex(),
            policies=lambda: make(eviction),
            announce=self._changes,
            watermarks=_FOR_SPACE_ONLY,
            disk=_Disk(num_disk_blocks) if num_disk_blocks else None,
        )
        self.num_refused = 0  # blocks that found no room, since all others were being read

    def __len__(self) -> int:
        return len(self._catalog)

    @property
    def num_evicted(self) -> int:
        return self._catalog.counters["evictions_succeeded"]

    @property
    def num_free(self) -> int:
        """Blocks for which there is room in memory."""
        return self._catalog.space.free_bytes // UNIT

    @property
    def has_news(self) -> bool:
        return self._changes.next_seq != self._changes.first_seq

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._catalog.present(keys)

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are here, in either tier."""
        present = self._catalog.present(keys)
        return len(keys) if all(present) else present.index(False)

    def hold(self, keys: Sequence[BlockKey]) -> Held:
        """Begins to read the leading blocks that are here, which counts as a use of each."""
        objects: list[StoredObject] = []
        for key in keys:
            stored = self._catalog.find(key)
            if stored is None:
                break
            self._catalog.hold(stored)
            objects.append(stored)
        self._catalog.used(reversed(objects))  # as a lease does: a chain's head is the last to leave
        return Held(tuple(objects))

    def let_go(self, held: Held) -> None:
        """What was read from disk is in memory from now on, as far as there is room."""
        for stored in held.objects:
            if stored.tier is Tier.DISK:
                self._promote(stored)
        for stored in held.objects:
            self._catalog.let_go(stored)

    def put(self, keys: Sequence[BlockKey], first: int) -> None:
        """Stores the blocks of a chain from number `first` on; those that are here stay as they are."""
        before = keys[first - 1] if first else None
        new = keys[first:]
        for parent, key, is_here in zip((before, *new), new, self.present(new), strict=False):
            # It may have been evicted for one that came before it in this very loop, which is as good as absent.
            if not is_here and not self._put(key, parent):
                self.num_refused += 1
                return  # what follows would only be found after it

    def take_changes(self) -> BlockChanges | None:
        """What happened since the last call; None = nothing."""
        return self._changes.take() if self.has_news else None

    def snapshot(self) -> BlockChanges:
        """Everything that is here, in place of what was told before."""
        self._changes.told()
        seq = self._changes.next_seq
        added = tuple((o.key, o.parent or NO_PARENT) for o in self._catalog.objects())
        return BlockChanges(first_seq=seq, next_seq=seq, added=added, snapshot=True)

    def on_disk(self) -> list[StoredObject]:
        """What outlives the machine, in the order in which it was stored."""
        objects = [stored for stored in self._catalog.objects() if stored.place is not None]
        return sorted(objects, key=lambda stored: stored.generation)

    def restore(self, objects: Iterable[StoredObject]) -> None:
        """What another life of this machine left on its disk."""
        for stored in objects:
            stored.offset = None
            self._catalog.restore(stored)

    def _put(self, key: BlockKey, parent: BlockKey | None) -> bool:
        self._make_room()
        stored = self._catalog.reserve(Wish(key=key, parent=parent, length=UNIT))
        if stored is None:
            return False
        self._catalog.publish(stored, checksum=0)
        return True

    def _promote(self, stored: StoredObject) -> None:
        current = self._catalog.find(stored.key)
        if current is None or current.offset is not None:
            return
        self._make_room()
        offset = self._catalog.room.for_copy(UNIT)
        if offset is not None:
            self._catalog.enter_memory(current, offset)

    def _make_room(self) -> None:
        """With a disk, the coldest block is there before it leaves memory."""
        catalog = self._catalog
        if catalog.disk is None or catalog.space.free_bytes >= UNIT:
            return
        coldest = catalog.room.coldest_in_memory()
        if coldest is None:
            return
        if coldest.place is None:
            if not catalog.room.on_disk(UNIT, for_demotion=True):
                return
            self._num_places += 1
            catalog.set_place(coldest, Place(self._num_places))
        catalog.leave_memory(coldest)

    def validate(self, held: Iterable[Held] = ()) -> None:
        """Raises AssertionError unless space, counts and chains agree, with exactly these reads under way."""
        self._catalog.validate(held=[o for each in held for o in each.objects], reserved=[])
