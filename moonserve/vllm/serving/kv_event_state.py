"""Blocks in vLLM's prefix cache under the cluster's keys, as its KV events tell. Pure.

vLLM names a block by a hash of its own; an event has the block's tokens and its parent's hash, from which the key
follows. Batches of events are numbered. After a gap the publisher repeats what it remembers; if that does not reach
back far enough, all blocks are forgotten, and become known again as they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey, child_key, pack_tokens

BlockHash = bytes | int
"""vLLM's name of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSource:
    """ZMQ endpoints at which an engine publishes its events."""

    endpoint: str
    replay: str | None  # None = it repeats nothing
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Consecutive blocks of one chain entered the cache, or were used from it."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None  # None = the chain starts here
    token_ids: tuple[int, ...]
    block_size: int
    salt: str = ""  # of the first block
    is_foreign: bool = False  # keys of the cluster do not cover it: adapters, images, windows of attention
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks left the cache."""

    hashes: tuple[BlockHash, ...]
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The cache is empty."""


Change = Stored | Removed | Cleared


class CachedBlocks:
    """Follows one engine's events. `added` is called with key and parent (None = none), `removed` with a key."""

    def __init__(
        self,
        root: BlockKey,
        block_size: int,
        added: Callable[[BlockKey, BlockKey | None], None],
        removed: Callable[[BlockKey], None],
    ) -> None:
        self.num_gaps = 0  # after which blocks were forgotten
        self._root = root
        self._block_size = block_size
        self._added, self._removed = added, removed
        self._next_seq = 0
        self._keys: dict[BlockHash, BlockKey] = {}
        self._group: int | None = None  # whose events are followed: the first with blocks that keys cover

    @property
    def next_seq(self) -> int:
        """Number of the batch that must come next."""
        return self._next_seq

    def misses(self, seq: int) -> bool:
        """Returns True if batches before this one are missing, which the publisher is to repeat."""
        return seq > self._next_seq

    def apply(self, seq: int, changes: Iterable[Change]) -> None:
        """Applies a batch, unless it was applied before. Forgets all blocks if batches before it are missing."""
        if seq < self._next_seq:
            return
        if self.misses(seq):
            self.num_gaps += 1
            self._forget()
        self._next_seq = seq + 1
        for change in changes:
            match change:
                case Stored():
                    self._store(change)
                case Removed():
                    self._remove(change)
                case Cleared():
                    self._forget()

    def _store(self, event: Stored) -> None:
        if event.is_foreign or event.block_size != self._block_size:
            return
        if self._group is None:
            self._group = event.group
        parent = self._root if event.parent is None else self._keys.get(event.parent)
        if event.group != self._group or parent is None:
            return
        is_first = event.parent is None
        for number, name in enumerate(event.hashes):
            tokens = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            if is_first and len(event.salt) == 2 * KEY_BYTES:  # the key itself: `service.salt_of`
                key = BlockKey(bytes.fromhex(event.salt))
            else:
                key = child_key(parent, pack_tokens(tokens))
            if name not in self._keys:
                self._keys[name] = key
                self._added(key, None if is_first else parent)
            parent, is_first = key, False

    def _remove(self, event: Removed) -> None:
        if event.group != self._group:
            return
        for name in event.hashes:
            key = self._keys.pop(name, None)
            if key is not None:
                self._removed(key)

    def _forget(self) -> None:
        for key in self._keys.values():
            self._removed(key)
        self._keys.clear()
