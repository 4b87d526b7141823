"""A pure node with two tiers for tests. It also does the shell's work: writing to disk and recovery."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moonserve.kvstore.disk.base import DiskObject, Pin
from moonserve.kvstore.state.allocator import ALIGNMENT
from moonserve.kvstore.state.objects import DiskReadMove, DiskWriteMove, PutOutcome, PutRequest, Tier, Watermarks
from moonserve.kvstore.state.state import StoreState
from moonserve.protocol.kv_blocks import BlockKey, pack_keys
from tests.kvstore.hardware import Disk
from tests.kvstore.state.states import Heard, make_state

UNIT = Disk(0).space(ALIGNMENT)
"""Disk space of an object that takes one unit of memory."""
TTL_S = 30.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def chain(*numbers: int, length: int = ALIGNMENT, **more: Any) -> list[PutRequest]:
    """Returns wishes for the blocks `numbers`, each the parent of the next. `more` is passed on to `PutRequest`."""
    parents = [None, *map(key, numbers)]
    return [
        PutRequest(key=key(n), parent=parent, length=length, **more)
        for n, parent in zip(numbers, parents, strict=False)
    ]


@dataclass
class Tiered:
    """A pure node with two tiers whose objects are named by numbers."""

    state: StoreState
    heard: Heard
    disk: Disk
    num_rights: int = 0

    @classmethod
    def make(
        cls, memory: int = 4, disk: int | None = 16, *, quotas: dict[str, int] | None = None, **more: Any
    ) -> "Tiered":
        """Builds a node. Sizes and quotas are in units of one object's space; `disk` None = no disk. `more` is passed
        on to `make_state`."""
        heard, counted = Heard(), Disk((disk or 0) * UNIT)
        in_bytes = {name: units * ALIGNMENT for name, units in (quotas or {}).items()}
        tier = None if disk is None else counted
        return cls(make_state(memory * ALIGNMENT, heard, disk=tier, quotas=in_bytes, **more), heard, counted)

    def kept(self) -> list[BlockKey]:
        """Returns the sorted keys of the objects at live places of the disk."""
        return sorted(self.disk.kept[place].key for place in self.disk.live)

    def new_id(self) -> str:
        self.num_rights += 1
        return f"id-{self.num_rights}"

    def put(self, wishes: Sequence[PutRequest], now: float = 0.0) -> list[PutOutcome]:
        """Stores objects whose checksums are their keys' numbers. Returns the outcome of each wish."""
        name = self.new_id()
        reservation = self.state.reservations.reserve(name, wishes, TTL_S, now)
        if reservation.objects:
            sums = {block: int.from_bytes(block, "little") for block in reservation.objects}
            self.state.reservations.commit(name, sums, now)
            self.state.reservations.verified(name, [], now)
        return [slot.outcome for slot in reservation.slots]

    def put_each(self, *numbers: int, now: float = 0.0, **more: Any) -> None:
        """Stores objects without parents. `more` is passed on to `chain`."""
        for number in numbers:
            self.put(chain(number, **more), now)

    def put_on_disk(self, *numbers: int) -> None:
        """Stores objects without parents one after another and moves each to disk, out of memory."""
        for number in numbers:
            self.put(chain(number))
            self.sink(number)

    def use(self, *numbers: int) -> None:
        self.state.record_uses(pack_keys(keys(*numbers)))

    def demotions(self) -> list[DiskWriteMove]:
        return self.state.tier_moves.demotions(2**30)

    def written(self, stores: Iterable[DiskWriteMove]) -> None:
        for store in stores:
            self.state.tier_moves.write_ended(store, self.disk.write(store.object.header()))

    def copy(self, *numbers: int) -> None:
        """Copies objects to disk; they stay in memory."""
        found = [stored for n in numbers if (stored := self.state.catalog.find(key(n))) is not None]
        self.written(filter(None, map(self.state.tier_moves.copy, found)))

    def sink(self, *numbers: int) -> None:
        """Moves objects to disk and out of memory."""
        self.copy(*numbers)
        for number in reversed(numbers):
            stored = self.state.catalog.find(key(number))
            assert stored is not None
            self.state.catalog.leave_memory(stored)

    def recover(self, number: int, generation: int, pin: Pin = Pin.NONE) -> bool:
        """Restores an object as if a restart found it on disk. Returns whether the node kept it."""
        found = DiskObject(
            key=key(number), parent=None, length=ALIGNMENT, checksum=number, generation=generation, pin=pin
        )
        place = self.disk.write(found)
        kept = self.state.restore(found, place)
        if not kept:
            self.disk.release(place)
        return kept

    def lease(self, *numbers: int) -> tuple[str, tuple[DiskReadMove, ...]]:
        name = self.new_id()
        return name, self.state.leases.grant(name, keys(*numbers), TTL_S, 0.0).loads

    def tiers(self) -> dict[int, Tier]:
        """Returns the tier of each visible object, in the order of their numbers."""
        self.state.validate()
        tiers = {int.from_bytes(block, "little"): tier for block, tier in self.heard.tiers.items()}
        return dict(sorted(tiers.items()))

    def in_memory(self) -> list[int]:
        return [number for number, tier in self.tiers().items() if tier is Tier.MEMORY]

    def on_disk_only(self) -> list[int]:
        return [number for number, tier in self.tiers().items() if tier is Tier.DISK]


def filled(count: int) -> Tiered:
    """Returns a node with objects 1 to `count` without parents. With more than 90 it is above its high watermark."""
    node = Tiered.make(100, 200, watermarks=Watermarks())
    node.put_each(*range(1, count + 1))
    return node
