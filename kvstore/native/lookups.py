"""What a reader of mapped memory says of keys: the words that C and Python share. Does no reading."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.native.base import Entry
from protocol.keys import BlockKey

Addresses = npt.NDArray[np.uint64]


class Presence(IntEnum):
    """Bytes that `MappedReader.exists` gives."""

    ABSENT = 0
    PRESENT = 1
    UNKNOWN = 2


class NotCopied(IntEnum):
    """Lengths below zero that `MappedReader.copy` gives."""

    ABSENT = -1
    ON_DISK = -2
    TOO_SMALL = -3
    """Checksum and generation are given."""
    CHANGED = -4
    """It was moved or removed meanwhile; worth another try."""
    UNKNOWN = -5
    """Ask the owner."""


class Standing(IntEnum):
    """What `MappedReader.locate` says of an object, above the 32 bits of its length."""

    MISSING = 0
    SENT = 1
    """Its bytes are among the pieces."""
    IN_MEMORY = 2
    """They are not: no room."""
    ON_DISK = 3
    UNKNOWN = 4
    """Ask the owner."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One element per key; checksum and generation are 0 where nothing was found."""

    rows: npt.NDArray[np.int64]
    """Shape (3, keys): one piece of memory costs a third of three."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Or `NotCopied`."""
        lengths: npt.NDArray[np.int64] = self.rows[0]
        return lengths

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        return _unsigned(self.rows[1])

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        return _unsigned(self.rows[2])


def _unsigned(row: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    words: npt.NDArray[np.uint64] = row.view(np.uint64)
    return words


class Lookups(Protocol):
    """What C and Python do alike, over memory whose bounds were checked. Raises Retired."""

    def find(self, key: BlockKey) -> tuple[int, Entry | None]:
        """The entry is given with PRESENT."""

    def exists(self, packed_keys: bytes, count: int) -> bytes: ...

    def copy(
        self, packed_keys: bytes, addresses: Addresses, capacities: Addresses, into: Copied
    ) -> None: ...

    def locate(
        self, packed_keys: bytes, rooms: Addresses, budget: int, rows: Addresses, pieces: Addresses
    ) -> int:
        """How many pieces there are."""
