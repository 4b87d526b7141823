"""Reference record of a pool's values, independent of its nodes: which were committed, and which were removed.

Every value begins with its key, and no two are equal. Times are the world's.
"""

import itertools
import struct
from collections.abc import Callable, Iterable

from moonserve.kvstore.state.objects import ObjectListener, StoredObject, Tier
from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, checksum

_BEGIN = struct.Struct(f"<{KEY_BYTES}sQ")
SMALLEST = _BEGIN.size


class Truth:
    """Values of one world's pool."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._numbers = itertools.count(1)
        self._stored_at: dict[int, float] = {}  # by checksum: time at which the value was first visible on any node
        self._removed_at: dict[tuple[BlockKey, int], float] = {}  # by key and removal id: begin of the removal
        self._gone: dict[tuple[str, BlockKey], int] = {}  # by node and key: generations up to this one are removed

    def new_value(self, key: BlockKey, length: int) -> bytes:
        return _BEGIN.pack(key, next(self._numbers)).ljust(length, b"\5")

    def visible(self, found: StoredObject) -> None:
        self._stored_at.setdefault(found.checksum, self._now())

    def wrong(self, key: BlockKey, value: bytes) -> str:
        """Returns why a read value of `key` is wrong; empty if it is right."""
        if value[:KEY_BYTES] != key:
            return "another key's value"
        return "" if checksum([value]) in self._stored_at else "a value that was never committed"

    def removing(self, key: BlockKey, removal_id: int) -> None:
        """Records that a removal of `key` on all nodes begins."""
        self._removed_at[key, removal_id] = self._now()

    def removed_at(self, node: str, key: BlockKey, generation: int) -> None:
        """Records that a node has confirmed the removal of `key` up to this generation."""
        self._gone[node, key] = max(generation, self._gone.get((node, key), 0))

    def came_back(self, node: str, found: StoredObject) -> bool:
        """Returns True if the object had been removed from this node before."""
        return found.generation <= self._gone.get((node, found.key), 0)

    def leftovers(self, known: set[tuple[BlockKey, int]], objects: Iterable[StoredObject]) -> list[str]:
        """Returns a problem for each object that is older than a removal in `known`."""
        last: dict[BlockKey, float] = {}
        for key, removal_id in known:
            last[key] = max(last.get(key, 0.0), self._removed_at[key, removal_id])
        return [
            f"{stored.key.hex()} is there though it was removed everywhere"
            for stored in objects
            if self._stored_at[stored.checksum] < last.get(stored.key, 0.0)
        ]


class Shown:
    """Checks the `stored.Announcements` of one life of a node and passes them on to its event log."""

    def __init__(
        self, node: str, truth: Truth, find: Callable[[BlockKey], StoredObject | None], log: ObjectListener
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
