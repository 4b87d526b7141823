"""A prefix index that is obviously right: a record per block, and every question is answered by looking at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.prefix import EvictionPolicy
from engine.prefix.base import MAX_HITS
from protocol.ids import BlockId
from protocol.keys import BlockKey


@dataclass(slots=True)
class Record:
    key: BlockKey
    parent: BlockKey
    checksum: int
    hits: int
    is_idle: bool = False


class NaiveIndex:
    """A `PrefixIndex`."""

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        *,
        on_added: Callable[[BlockKey, BlockKey], None],
        on_removed: Callable[[BlockKey], None],
    ) -> None:
        self.records: dict[BlockId, Record] = {}
        self._policy = policy
        self._on_added = on_added
        self._on_removed = on_removed

    def __len__(self) -> int:
        return len(self.records)

    @property
    def num_idle(self) -> int:
        return sum(record.is_idle for record in self.records.values())

    def is_findable(self, block: BlockId) -> bool:
        return block in self.records

    def _block_of(self, key: BlockKey) -> BlockId | None:
        return next((b for b, record in self.records.items() if record.key == key), None)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        found: list[BlockId] = []
        for key in keys:
            block = self._block_of(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(
        self, block: BlockId, key: BlockKey, parent: BlockKey, checksum: int, *, hits: int = 0
    ) -> bool:
        if self._block_of(key) is not None:
            return False
        if block in self.records:
            raise ValueError(f"block {block} is already published under another key")
        self.records[block] = Record(key, parent, checksum, hits)
        self._on_added(key, parent)
        return True

    def key_of(self, block: BlockId) -> BlockKey | None:
        return self.records[block].key if block in self.records else None

    def checksum_of(self, block: BlockId) -> int | None:
        return self.records[block].checksum if block in self.records else None

    def hits_of(self, block: BlockId) -> int:
        return self.records[block].hits if block in self.records else 0

    def hit(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self.records[block].hits = min(self.records[block].hits + 1, MAX_HITS)

    def hold(self, block: BlockId) -> None:
        self.records[block].is_idle = False

    def let_go(self, block: BlockId) -> None:
        self.records[block].is_idle = True
        self._policy.let_go(block, self.records[block].hits)

    def _idle(self) -> list[BlockId]:
        idle = (block for block, record in self.records.items() if record.is_idle)
        return sorted(idle, key=self._policy.rank)

    def _children(self, block: BlockId) -> list[BlockId]:
        key = self.records[block].key
        return [child for child, record in self.records.items() if record.parent == key]

    def evict(self, count: int) -> list[BlockId]:
        gone: list[BlockId] = []
        while len(gone) < count:
            idle = self._idle()
            leaf = next((block for block in idle if not self._children(block)), None)
            if leaf is not None:
                self._policy.evicted(leaf)
            gone += self.remove(idle[0] if leaf is None else leaf)
        return gone

    def remove(self, block: BlockId) -> list[BlockId]:
        idle = [gone for child in self._children(block) for gone in self.remove(child)]
        record = self.records.pop(block)
        self._on_removed(record.key)
        return [*idle, block] if record.is_idle else idle

    def by_age(self) -> list[BlockId]:
        held = [block for block, record in self.records.items() if not record.is_idle]
        return [*self._idle(), *sorted(held, key=self._depth, reverse=True)]

    def _depth(self, block: BlockId) -> int:
        parent = self._block_of(self.records[block].parent)
        return 0 if parent is None else 1 + self._depth(parent)

    def items(self) -> Iterator[tuple[BlockKey, BlockKey, BlockId]]:
        for block in sorted(self.records, key=self._depth):
            yield self.records[block].key, self.records[block].parent, block

    def validate(self) -> None:
        assert len({record.key for record in self.records.values()}) == len(self.records)
