"""What changed on a node, from the messages that it sends its followers. Pure.

A message lists what is there now, whether it is new or has changed its tier; so what is there is remembered, in the
compact map that nodes use themselves. An inventory is no change: it comes when one begins to listen, or was away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvstore.native.base import NO_RECORD, KeyMap
from kvstore.native.library import key_map
from protocol.keys import BlockKey, iter_keys
from protocol.pb import kvstore_pb2

_TIERS = {kvstore_pb2.STORE_TIER_MEMORY: "memory", kvstore_pb2.STORE_TIER_DISK: "disk"}


@dataclass(slots=True)
class Counts:
    """Events of one node."""

    added: int = 0
    moved: int = 0
    removed: int = 0
    read: int = 0

    def add(self, other: Counts) -> None:
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def note(self, change: Change) -> None:
        setattr(self, change.what, getattr(self, change.what) + 1)

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Change:
    """`what`: added, moved, removed or read. `tier`: where it is then; empty for the latter two."""

    what: str
    key: BlockKey
    tier: str = ""


class Objects:
    """Which objects one node holds."""

    def __init__(self) -> None:
        self._there: KeyMap = key_map()
        self._in_inventory = False

    def __len__(self) -> int:
        return len(self._there)

    def apply(self, message: kvstore_pb2.StoreEvents) -> Iterator[Change]:
        """Iterate to the end; nothing is changed before."""
        if message.snapshot:
            self._there, self._in_inventory = key_map(), True
        for change in self._changes(message):
            if not self._in_inventory:
                yield change
        self._in_inventory = self._in_inventory and message.more

    def _changes(self, message: kvstore_pb2.StoreEvents) -> Iterator[Change]:
        for key, tier in zip(iter_keys(message.added_keys), message.added_tiers, strict=True):
            is_new = self._there.get(key) == NO_RECORD
            self._there.put(key, 1)
            yield Change("added" if is_new else "moved", key, _TIERS.get(tier, "?"))  # type: ignore[call-overload]
        for key in iter_keys(message.removed_keys):
            self._there.pop(key)
            yield Change("removed", key)
        for key in iter_keys(message.read_keys):
            yield Change("read", key)
