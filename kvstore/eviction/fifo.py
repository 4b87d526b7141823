"""First in, first out: what was stored longest ago goes first, however often it was read since."""

from __future__ import annotations

from kvstore.eviction.ranked import Ranked
from protocol.keys import BlockKey


class FirstInFirstOut(Ranked):
    """The line that a policy which looks at uses has to beat."""

    name = "fifo"

    def added(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._place(key, (self._tick(),))

    def used(self, key: BlockKey) -> None:
        """Changes nothing."""
