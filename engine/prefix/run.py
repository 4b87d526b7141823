"""A run: blocks of which each extends the one before, and none but the last may be extended in several ways.

Runs are the nodes of the radix tree. A run grows and shrinks at its end only. Knows nothing of references or of order.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from types import MappingProxyType

from protocol.ids import BlockId
from protocol.keys import KEY_BYTES, BlockKey

_NONE: Mapping[Run, None] = MappingProxyType({})


class Run:
    """`first`: what its first block counts as; those behind it count on, wherever the run lies and however it is split.
    A root is a run without blocks, whose `keys` are what its children follow."""

    __slots__ = ("blocks", "children", "first", "keys", "parent")

    def __init__(self, parent: Run | None, first: int) -> None:
        self.parent = parent
        self.first = first
        self.keys = bytearray()
        self.blocks = array("I")
        self.children: Mapping[Run, None] = _NONE  # in the order of their coming; most have none

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """What the next block would count as."""
        return self.first + len(self.blocks)

    def key_at(self, offset: int) -> BlockKey:
        return BlockKey(bytes(self.keys[offset * KEY_BYTES : (offset + 1) * KEY_BYTES]))

    def append(self, key: BlockKey, block: BlockId) -> None:
        self.keys += key
        self.blocks.append(block)

    def pop(self) -> tuple[BlockKey, BlockId]:
        """Takes the last block off."""
        key = BlockKey(bytes(self.keys[-KEY_BYTES:]))
        del self.keys[-KEY_BYTES:]
        return key, self.blocks.pop()

    def common(self, offset: int, packed: bytes, start: int) -> int:
        """How many blocks from `offset` on are those of `packed` keys from its `start`-th on."""
        equal, low = self.keys.startswith, 0
        length = min(len(self.blocks) - offset, len(packed) // KEY_BYTES - start)
        if equal(packed[start * KEY_BYTES : (start + length) * KEY_BYTES], offset * KEY_BYTES):
            return length
        while length - low > 1:  # `low` are equal, `length` are not
            middle = (low + length) // 2
            part = packed[(start + low) * KEY_BYTES : (start + middle) * KEY_BYTES]
            if equal(part, (offset + low) * KEY_BYTES):
                low = middle
            else:
                length = middle
        return low

    def adopt(self, child: Run) -> None:
        """`child` extends this run's last block from now on."""
        if not isinstance(self.children, dict):
            self.children = {}
        self.children[child] = None
        child.parent = self

    def disown(self, child: Run) -> None:
        assert isinstance(self.children, dict), "a run without children has none to lose"
        del self.children[child]
        if not self.children:
            self.children = _NONE

    def split(self, offset: int) -> Run:
        """Keeps the blocks before `offset`, of which there are some; the others become its only child."""
        rest = Run(self, self.first + offset)
        rest.keys, rest.blocks = self.keys[offset * KEY_BYTES :], self.blocks[offset:]
        for child in self.children:
            child.parent = rest
        rest.children, self.children = self.children, _NONE
        del self.keys[offset * KEY_BYTES :], self.blocks[offset:]
        self.adopt(rest)
        return rest

    def absorb(self, child: Run) -> None:
        """The inverse of `split`: `child` is its only one."""
        self.keys += child.keys
        self.blocks += child.blocks
        self.children = child.children
        for grandchild in self.children:
            grandchild.parent = self
