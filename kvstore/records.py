"""Table of a node's visible objects: per record, one row of plain numbers that readers do not need. Pure.

The table is stored in columns: a row takes 55 bytes, and a node holds millions. It does not know who holds an object,
nor sizes in bytes.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from kvstore.disk.base import Pin, Place
from kvstore.native.base import NO_RECORD, Record, RecordArray
from protocol.keys import KEY_BYTES, NO_PARENT, BlockKey

NO_PLACE = Place(2**64 - 1)
_IN_MEMORY = 1
_LEAVING = 2
_PINS = (Pin.NONE, Pin.SOFT, Pin.HARD)
_PIN_SHIFT = 2
_PIN_MASK = 3 << _PIN_SHIFT
_SECOND_HAND = 16
HAND_STEPS = 4096


class Records:
    """Rows by record number. A freed record is reused."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._parents = bytearray()
        self._free = array("I")
        self._flags = array("B")
        self.holds = array("I")
        """Number of leases, and of moves in flight."""
        self.followers = array("I")
        """Number of blocks, resident or being written, that name this one as their parent."""
        self.followers_in_memory = array("I")
        """Number of followers in memory, without those that are leaving it."""
        self.places = array("Q")
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
        self.holds[record] = self.followers[record] = self.followers_in_memory[record] = 0
        self.places[record] = NO_PLACE
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
        """Returns the next record without holds that is both in memory and on disk. Looks at HAND_STEPS rows at most;
        NO_RECORD = none found."""
        num_rows = len(self.holds)
        for _ in range(min(num_rows, HAND_STEPS)):
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

    def is_second_hand(self, record: Record) -> bool:
        """Returns True if the object was copied from another node since this node started, which makes it older than
        its generation says."""
        return bool(self._flags[record] & _SECOND_HAND)

    def set_second_hand(self, record: Record, copied: bool) -> None:
        flags = self._flags[record]
        self._flags[record] = flags | _SECOND_HAND if copied else flags & ~_SECOND_HAND

    def on_disk(self, record: Record) -> bool:
        return self.places[record] != NO_PLACE

    def pin(self, record: Record) -> Pin:
        return _PINS[(self._flags[record] & _PIN_MASK) >> _PIN_SHIFT]

    def set_pin(self, record: Record, pin: Pin) -> None:
        others = self._flags[record] & ~_PIN_MASK
        self._flags[record] = others | _PINS.index(pin) << _PIN_SHIFT

    @property
    def nbytes(self) -> int:
        """Memory in use by the rows."""
        columns = (self._flags, self.holds, self.followers, self.followers_in_memory)
        others = (self.places, self.tenants, self._free)
        return (
            sum(column.buffer_info()[1] * column.itemsize for column in (*columns, *others))
            + len(self._keys)
            + len(self._parents)
        )

    def _append(self) -> Record:
        for column in (self.holds, self.followers, self.followers_in_memory):
            column.append(0)
        self._keys += NO_PARENT
        self._parents += NO_PARENT
        self._flags.append(0)
        self.places.append(NO_PLACE)
        self.tenants.append(0)
        return len(self.holds) - 1
