"""What the planner remembers: copies that are expected, blocks that rest, replicas made for heat. Pure.

All of it may be lost with the process: what was made for heat is then like any other replica, and eviction takes it
when it is cold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from protocol.ids import InstanceId
from protocol.keys import BlockKey

UNDER_WAY_S = 120.0
"""A copy that was not settled by then is not expected any more."""
ANNOUNCED_S = 5.0
"""A copy that succeeded is announced by its node within milliseconds, or after the next inventory."""
SHUN_S = 10.0
"""A node that failed to take a copy is given none for so long."""


class Ledger:
    """Instants are monotonic; entries that are over are dropped by `expire`."""

    def __init__(self) -> None:
        self._expected: dict[BlockKey, dict[InstanceId, float]] = {}  # until when
        self._resting: dict[BlockKey, float] = {}  # until when
        self._shunned: dict[InstanceId, float] = {}  # until when
        self._made: dict[InstanceId, dict[BlockKey, float]] = {}  # since when

    def expect(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        for key in keys:
            self._expected.setdefault(key, {})[node] = now + UNDER_WAY_S

    def arrived(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        for key in keys:
            self._expected.setdefault(key, {})[node] = now + ANNOUNCED_S

    def announced(self, keys: Iterable[BlockKey], node: InstanceId) -> None:
        """The index knows of them: from now on it says who holds them."""
        for key in keys:
            self._expected.get(key, {}).pop(node, None)

    def failed(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        """They may be tried again at once, but not with this node."""
        for key in keys:
            self._expected.get(key, {}).pop(node, None)
            self._resting.pop(key, None)
        self._shunned[node] = now + SHUN_S

    def expected(self, key: BlockKey, now: float) -> set[InstanceId]:
        """The nodes that should hold it soon."""
        return {node for node, until in self._expected.get(key, {}).items() if until > now}

    def rest(self, keys: Iterable[BlockKey], until: float) -> None:
        for key in keys:
            self._resting[key] = until

    def is_resting(self, key: BlockKey, now: float) -> bool:
        return self._resting.get(key, now) > now

    def is_shunned(self, node: InstanceId, now: float) -> bool:
        return self._shunned.get(node, now) > now

    def note_made(self, keys: Iterable[BlockKey], node: InstanceId, now: float) -> None:
        for key in keys:
            self._made.setdefault(node, {})[key] = now

    def made(self) -> Iterator[tuple[InstanceId, dict[BlockKey, float]]]:
        """By node: the blocks it holds for their heat, and since when."""
        return ((node, dict(keys)) for node, keys in list(self._made.items()))

    def made_on(self, node: InstanceId) -> Mapping[BlockKey, float]:
        """The blocks that one node holds for their heat, and since when; to be read at once."""
        return self._made.get(node, {})

    @property
    def num_made(self) -> int:
        """On all nodes together."""
        return sum(map(len, self._made.values()))

    def was_made(self, key: BlockKey) -> bool:
        """On any node."""
        return any(key in keys for keys in self._made.values())

    def forget_made(self, key: BlockKey, node: InstanceId) -> None:
        """No-op when it was not."""
        keys = self._made.get(node, {})
        keys.pop(key, None)
        if not keys:
            self._made.pop(node, None)

    def expire(self, now: float) -> None:
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._shunned = {node: until for node, until in self._shunned.items() if until > now}
        for key in list(self._expected):
            nodes = {node: until for node, until in self._expected[key].items() if until > now}
            if nodes:
                self._expected[key] = nodes
            else:
                del self._expected[key]
