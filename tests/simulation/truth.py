"""What is true of a pool's values, whatever its nodes say: which there are, and which may not be there any more.

Every value says whose it is, and no two are equal. Instants are the world's.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable

from kvstore.stored import Announcements, StoredObject, Tier
from protocol.checksum import checksum
from protocol.keys import KEY_BYTES, BlockKey

_BEGIN = struct.Struct(f"<{KEY_BYTES}sQ")
SMALLEST = _BEGIN.size


class Truth:
    """Of one world."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._numbers = itertools.count(1)
        self._stored_at: dict[int, float] = {}  # by checksum: when it was first visible anywhere
        self._removed_at: dict[tuple[BlockKey, int], float] = {}  # when that began, by id
        self._gone: dict[tuple[str, BlockKey], int] = {}  # by node: generations up to this one

    def new_value(self, key: BlockKey, length: int) -> bytes:
        return _BEGIN.pack(key, next(self._numbers)).ljust(length, b"\5")

    def visible(self, found: StoredObject) -> None:
        self._stored_at.setdefault(found.checksum, self._now())

    def wrong(self, key: BlockKey, value: bytes) -> str:
        """Why a reader may not believe that this is the value of `key`; empty when it may."""
        if value[:KEY_BYTES] != key:
            return "another key's value"
        return "" if checksum([value]) in self._stored_at else "a value that was never committed"

    def removing(self, key: BlockKey, removal_id: int) -> None:
        """Everywhere."""
        self._removed_at[key, removal_id] = self._now()

    def removed_at(self, node: str, key: BlockKey, generation: int) -> None:
        """One node has answered that it holds nothing of `key` up to this generation any more."""
        self._gone[node, key] = max(generation, self._gone.get((node, key), 0))

    def came_back(self, node: str, found: StoredObject) -> bool:
        """Whether a restart found what had been removed."""
        return found.generation <= self._gone.get((node, found.key), 0)

    def leftovers(self, known: set[tuple[BlockKey, int]], objects: Iterable[StoredObject]) -> list[str]:
        """Objects that were there before a removal of which somebody knows."""
        last: dict[BlockKey, float] = {}
        for key, removal_id in known:
            last[key] = max(last.get(key, 0.0), self._removed_at[key, removal_id])
        return [
            f"{stored.key.hex()} is there though it was removed everywhere"
            for stored in objects
            if self._stored_at[stored.checksum] < last.get(stored.key, 0.0)
        ]


class Shown:
    """`stored.Announcements` of one life of a node, on their way to its log: what it says must be what there is."""

    def __init__(
        self, node: str, truth: Truth, find: Callable[[BlockKey], StoredObject | None], log: Announcements
    ) -> None:
        self._log = log
        self.expected: dict[BlockKey, tuple[int, int, Tier]] = {}
        self._node = node
        self._truth = truth
        self._find = find

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        self._log.added(key, parent, tier)
        found = self._find(key)
        assert found is not None
        assert key not in self.expected
        if tier is Tier.DISK:
            assert not self._truth.came_back(self._node, found), "a removed object is back"
        self._truth.visible(found)
        self.expected[key] = found.generation, found.checksum, tier

    def moved(self, key: BlockKey, tier: Tier) -> None:
        self._log.moved(key, tier)
        self.expected[key] = *self.expected[key][:2], tier

    def removed(self, key: BlockKey) -> None:
        self._log.removed(key)
        del self.expected[key]
