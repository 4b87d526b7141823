"""The slots of a key index, searched and changed by Python.

On processors that reorder stores (not x86) nothing here orders them; an entry that is read in the midst of a change
is still recognized by its tag.
"""

from __future__ import annotations

from kvstore.native.layout import (
    EMPTY,
    GENERATION_AT,
    HEADER,
    SLOT,
    VERSION_AT,
    Fields,
    Geometry,
)
from protocol.keys import KEY_BYTES, BlockKey

_WORD = 8


class Slots:
    """Places are offsets in the memory."""

    def __init__(self, memory: memoryview, geometry: Geometry) -> None:
        self.memory = memory
        self.geometry = geometry
        self.end = geometry.nbytes
        self._words = memory[: geometry.nbytes].cast("Q")

    def search(self, key: BlockKey) -> int:
        """The place of `key`; else that of the empty slot where its run ends, or `end`."""
        at = self.geometry.home_of(key)
        while at < self.end and self.used(at) and bytes(self.memory[at : at + KEY_BYTES]) != key:
            at += SLOT.size
        return at

    def used(self, at: int) -> bool:
        """Whether there is an entry; there is none at the end."""
        return at < self.end and self._words[(at + GENERATION_AT) // _WORD] != 0

    def fields(self, at: int) -> Fields:
        return SLOT.unpack_from(self.memory, at)

    def write(self, at: int, fields: Fields) -> None:
        # Not `pack_into`, which clears what is there first.
        self.memory[at : at + SLOT.size] = SLOT.pack(*fields)

    def close_hole(self, hole: int) -> None:
        """Moves entries behind it forward, so that no run is broken and nothing marks what was there."""
        at = hole + SLOT.size
        while self.used(at):
            fields = self.fields(at)
            if self.geometry.home_of(BlockKey(fields[0])) <= hole:
                self.write(hole, fields)
                hole = at
            at += SLOT.size
        self.memory[hole : hole + SLOT.size] = EMPTY

    def release(self) -> None:
        """Nothing here holds the memory any more, so that its owner can unmap it."""
        self._words.release()

    def places(self) -> range:
        return range(HEADER.size, self.end, SLOT.size)

    @property
    def version(self) -> int:
        """Odd while entries change."""
        return self._words[VERSION_AT // _WORD]

    def turn_version(self) -> None:
        self._words[VERSION_AT // _WORD] = (self.version + 1) % 2**64
