"""Keys under which vLLM's blocks are stored: chained hashes of token ids, in a namespace that fixes what bytes mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonserve.kvstore.client import Block
from moonserve.protocol.kv_blocks import BlockKey, child_key, pack_tokens, root_key

Extras = Callable[[int, int], bytes]
"""Returns what else the KV of tokens [first, last) depends on: LoRA, images, the request's cache salt."""


class ChainedKeys:
    """Keys of the full blocks of one growing sequence of tokens."""

    def __init__(self, root: BlockKey, block_size: int) -> None:
        self._block_size = block_size
        self._root = root
        self.keys: list[BlockKey] = []

    def extend(self, token_ids: Sequence[int], extras: Extras | None) -> None:
        """Adds the keys of further full blocks. The tokens before them must be as at the last call."""
        size = self._block_size
        for first in range(len(self.keys) * size, len(token_ids) - size + 1, size):
            packed = pack_tokens(token_ids[first : first + size])
            if extras is not None:
                packed += extras(first, first + size)
            self.keys.append(child_key(self.keys[-1] if self.keys else self._root, packed))


class StoredKeys:
    """Turns keys of tokens into keys of one group's objects at one rank."""

    def __init__(self, namespace: str, group: int, rank: int) -> None:
        self._root = root_key(f"{namespace}|group {group}|rank {rank}")

    def blocks(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[Block]:
        """Returns the store's blocks for some of a sequence's keys. All have the same head, hence the same home."""
        if not places:
            return []
        head = self._of(keys[0])
        return [Block(self._of(keys[i]), head, self._of(keys[i - 1]) if i else None) for i in places]

    def _of(self, key: BlockKey) -> BlockKey:
        return child_key(self._root, key)
