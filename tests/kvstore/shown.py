"""What a simulated node has announced: which objects it shows, and what became of them.

Its rule: whatever goes without having been asked for was evicted. Knows no disk and no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.stored import StoredObject, Tier
from protocol.keys import BlockKey


class Shown:
    """`stored.Announcements` of one life."""

    def __init__(self, find: Callable[[BlockKey], StoredObject | None]) -> None:
        self.expected: dict[BlockKey, int] = {}
        """Contents."""
        self.num_evicted = 0
        self._find = find
        self._is_asked = False

    def added(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        found = self._find(key)
        assert found is not None
        self.expected[key] = found.checksum

    def moved(self, key: BlockKey, tier: Tier) -> None:
        assert key in self.expected

    def removed(self, key: BlockKey) -> None:
        del self.expected[key]
        self.num_evicted += not self._is_asked

    def asked(self, action: Callable[[], Any]) -> Any:
        """Runs what may remove objects that are not evicted."""
        self._is_asked = True
        try:
            return action()
        finally:
            self._is_asked = False
