"""Tables of the catalog alone: rows of visible objects, totals of their space, times of their generations. Pure.

The rows hold what readers do not need. They are columns of plain numbers: a row takes 55 bytes, and a node holds
millions.
"""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moonserve.kvstore.disk.base import DiskSpace, Pin, Place
from moonserve.kvstore.index_layout import MAX_OBJECT_BYTES, NO_RECORD, Record, RecordArray
from moonserve.kvstore.state.allocator import Allocator, padded
from moonserve.kvstore.state.objects import StoredObject, Usage
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KEY_BYTES, NO_PARENT, BlockKey

NO_PLACE = Place(2**64 - 1)
_IN_MEMORY = 1
_LEAVING = 2
_PINS = (Pin.NONE, Pin.SOFT, Pin.HARD)
_PIN_SHIFT = 2
_PIN_MASK = 3 << _PIN_SHIFT
_COPIED = 16
MAX_CLOCK_STEPS = 4096


class Records:
    """Rows by record number. A freed record is reused."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._parents = bytearray()
        self._free = array("I")
        self._flags = array("B")
        self.holds = array("I")
        """Number of leases, and of moves in flight."""
        self.num_children = array("I")
        """Number of blocks, resident or being written, that name this one as their parent."""
        self.num_children_in_memory = array("I")
        """Number of followers in memory, without those that are leaving it."""
        self.disk_places = array("Q")
        """Place on disk; NO_PLACE = not there."""
        self.tenants = array("H")
        self._hand = 0  # clock hand of `next_spare_copy`

    def __len__(self) -> int:
        return len(self.holds) - len(self._free)

    def add(self, key: BlockKey, parent: BlockKey | None, tenant: int, pin: Pin) -> Record:
        """Adds a row without copies or followers. Returns its record."""
        record = self._free.pop() if self._free else self._append()
        at = record * KEY_BYTES
        self._keys[at : at + KEY_BYTES] = key
        self._parents[at : at + KEY_BYTES] = parent or NO_PARENT
        self.tenants[record] = tenant
        self._flags[record] = _PINS.index(pin) << _PIN_SHIFT
        return record

    def free(self, record: Record) -> None:
        self.holds[record] = self.num_children[record] = self.num_children_in_memory[record] = 0
        self.disk_places[record] = NO_PLACE
        self._free.append(record)

    def key(self, record: Record) -> BlockKey:
        at = record * KEY_BYTES
        return BlockKey(bytes(self._keys[at : at + KEY_BYTES]))

    def parent(self, record: Record) -> BlockKey | None:
        at = record * KEY_BYTES
        parent = BlockKey(bytes(self._parents[at : at + KEY_BYTES]))
        return None if parent == NO_PARENT else parent

    def in_memory(self, record: Record) -> bool:
        return bool(self._flags[record] & _IN_MEMORY)

    def in_memory_all(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Returns `in_memory` of each record."""
        flags = np.frombuffer(self._flags, np.uint8)[records]  # indexing copies: no view may outlive this, columns grow
        return (flags & _IN_MEMORY).astype(np.bool_)

    def tenants_all(self, records: RecordArray) -> npt.NDArray[np.uint16]:
        """Returns the tenant number of each record."""
        return np.frombuffer(self.tenants, np.uint16)[records]

    def set_in_memory(self, record: Record, present: bool) -> None:
        flags = self._flags[record]
        self._flags[record] = flags | _IN_MEMORY if present else flags & ~_IN_MEMORY

    def next_spare_copy(self) -> Record:
        """Returns the next record without holds that is both in memory and on disk. Looks at MAX_CLOCK_STEPS rows at
        most; NO_RECORD = none found."""
        num_rows = len(self.holds)
        for _ in range(min(num_rows, MAX_CLOCK_STEPS)):
            self._hand = record = (self._hand + 1) % num_rows
            if self.on_disk(record) and self.in_memory(record) and not self.holds[record]:
                return record
        return NO_RECORD

    def is_leaving(self, record: Record) -> bool:
        """Returns True if the object is being written to disk in order to leave memory."""
        return bool(self._flags[record] & _LEAVING)

    def set_leaving(self, record: Record, leaving: bool) -> None:
        flags = self._flags[record]
        self._flags[record] = flags | _LEAVING if leaving else flags & ~_LEAVING

    def is_copied(self, record: Record) -> bool:
        """Returns True if the object was copied from another node since this node started, which makes it older than
        its generation says."""
        return bool(self._flags[record] & _COPIED)

    def set_copied(self, record: Record, copied: bool) -> None:
        flags = self._flags[record]
        self._flags[record] = flags | _COPIED if copied else flags & ~_COPIED

    def on_disk(self, record: Record) -> bool:
        return self.disk_places[record] != NO_PLACE

    def pin(self, record: Record) -> Pin:
        return _PINS[(self._flags[record] & _PIN_MASK) >> _PIN_SHIFT]

    def set_pin(self, record: Record, pin: Pin) -> None:
        others = self._flags[record] & ~_PIN_MASK
        self._flags[record] = others | _PINS.index(pin) << _PIN_SHIFT

    @property
    def nbytes(self) -> int:
        """Memory in use by the rows."""
        columns = (self._flags, self.holds, self.num_children, self.num_children_in_memory)
        others = (self.disk_places, self.tenants, self._free)
        return (
            sum(column.buffer_info()[1] * column.itemsize for column in (*columns, *others))
            + len(self._keys)
            + len(self._parents)
        )

    def _append(self) -> Record:
        for column in (self.holds, self.num_children, self.num_children_in_memory):
            column.append(0)
        self._keys += NO_PARENT
        self._parents += NO_PARENT
        self._flags.append(0)
        self.disk_places.append(NO_PLACE)
        self.tenants.append(0)
        return len(self.holds) - 1


Extent = tuple[int | None, int]
"""(offset, length) in memory; offset None = not in memory."""


@dataclass(slots=True, eq=False)
class HiddenSpace:
    """Space of an object that was removed while it was held. It is freed when the last hold ends."""

    offset: int | None  # None = was not in memory
    length: int
    holds: int


@dataclass(slots=True, eq=False)
class SpaceAccounting:
    """Counters of bytes and objects, updated with each change: free + held + leased + reserved = capacity.

    Bytes of memory are padded as by the allocator, bytes of disk as by the disk.
    """

    space: Allocator
    reserved_bytes: int = 0  # memory being written or loaded
    disk_writing_bytes: int = 0  # disk space being written
    leased_bytes: int = 0  # memory of objects with a hold
    num_leased: int = 0
    num_on_disk: int = 0  # objects that are only on disk
    num_disk_copies: int = 0  # objects with a disk copy
    disk_live: int = 0
    hidden: dict[int, HiddenSpace] = field(default_factory=dict)
    """Removed objects with holds, by generation: a key may have several."""

    def drop_hidden_hold(self, generation: int) -> None:
        """Drops one hold of a removed object. The last one frees its memory."""
        remains = self.hidden[generation]
        remains.holds -= 1
        if not remains.holds:
            del self.hidden[generation]
            if remains.offset is not None:
                self.leased_bytes -= padded(remains.length)
                self.space.free(remains.offset, remains.length)

    def check_size(self, length: int) -> None:
        """Raises InvalidRequest if an object of this length could never fit."""
        if padded(length) > self.space.capacity or length > MAX_OBJECT_BYTES:
            raise InvalidRequest(
                f"an object of {length} bytes does not fit into this store's segment of {self.space.capacity} bytes",
                param="length",
            )

    @property
    def evictable_bytes(self) -> int:
        """Bytes of memory that are free or taken by objects without a hold."""
        return self.space.capacity - self.leased_bytes - self.reserved_bytes

    def disk_free(self, disk: DiskSpace | None) -> int:
        """Returns the live bytes that the disk may still take."""
        return disk.live_limit - self.disk_live - self.disk_writing_bytes if disk else 0

    def usage(self, num_objects: int, disk: DiskSpace | None, tenants: Mapping[str, int]) -> Usage:
        return Usage(
            capacity_bytes=self.space.capacity,
            free_bytes=self.space.free_bytes,
            held_bytes=self.space.used - self.leased_bytes - self.reserved_bytes,
            leased_bytes=self.leased_bytes,
            reserved_bytes=self.reserved_bytes,
            disk_limit_bytes=disk.live_limit if disk else 0,
            disk_live_bytes=self.disk_live,
            num_objects=num_objects,
            num_leased=self.num_leased,
            num_on_disk=self.num_on_disk,
            tenant_bytes=tenants,
        )

    def validate(
        self,
        visible: Sequence[StoredObject],
        rows: Records,
        disk: DiskSpace | None,
        *,
        writing: Sequence[Extent],
        loading: Sequence[Extent],
    ) -> None:
        """Raises AssertionError unless the counters match exactly the visible objects and these extents."""
        here = [(o.offset, o.length) for o in visible]
        remains = self.hidden.values()
        hidden = [(r.offset, r.length) for r in remains if r.offset is not None]
        taken = [*here, *writing, *hidden, *loading]
        self.space.validate((at, length) for at, length in taken if at is not None)
        leased = [o for o in visible if rows.holds[o.record]]
        assert self.num_leased == len(leased)
        assert self.leased_bytes == sum(o.space for o in leased if o.offset is not None) + sum(
            padded(length) for _, length in hidden
        )
        assert self.reserved_bytes == sum(padded(length) for _, length in (*writing, *loading))
        assert self.num_on_disk == sum(o.offset is None for o in visible)
        on_disk = [o for o in visible if o.place is not None]
        space = disk.space if disk else (lambda length: 0)
        assert self.disk_live == sum(space(o.length) for o in on_disk)
        assert self.num_disk_copies == len(on_disk)
        assert all(o.offset is not None or o.place is not None for o in visible)


OBJECTS_BITS = 40
"""Low bits of a generation: a trillion objects per start. The other 24 of 64 bits count the starts."""


def first_generation_of(incarnation: int) -> int:
    """Returns the first generation of a start. Starts are counted from 1."""
    return incarnation << OBJECTS_BITS


FINE_S = 0.02
COARSE_S = 10.0
_NUM_FINE = 4_096
_NUM_COARSE = 9_000


class GenerationMark(NamedTuple):
    """Generations below `generation` were assigned before `at`, all others at `at` or later."""

    at: float
    generation: int


class GenerationClock:
    """Remembers when a node assigned its generations, within limits.

    With it, a removal that is reported late removes only the objects that were there when it happened.
    """

    def __init__(self) -> None:
        self._fine: deque[GenerationMark] = deque(maxlen=_NUM_FINE)
        self._coarse: deque[GenerationMark] = deque(maxlen=_NUM_COARSE)

    def record(self, now: float, next_generation: int) -> None:
        """Notes that `next_generation` is about to be assigned at `now`."""
        if self._fine and now - self._fine[-1].at < FINE_S:
            return
        self._fine.append(GenerationMark(now, next_generation))
        if not self._coarse or now - self._coarse[-1].at >= COARSE_S:
            self._coarse.append(self._fine[-1])

    def bound_before(self, at: float, next_generation: int) -> int:
        """Returns a bound: generations that were assigned before `at` are below it."""
        marks = self._fine if self._fine and self._fine[0].at <= at else self._coarse
        later = next((mark for mark in (*marks, *self._fine) if mark.at >= at), None)
        return next_generation if later is None else later.generation
