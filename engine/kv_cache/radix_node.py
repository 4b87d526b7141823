"""Nodes of the radix tree: a run is a chain of blocks in which only the last one may have several extensions.

A run grows and shrinks at its end only. It knows nothing of references or eviction order.
"""

from array import array
from collections.abc import Mapping
from types import MappingProxyType

from moonserve.protocol.kv_blocks import KEY_BYTES, BlockKey
from moonserve.protocol.request import BlockId

_NONE: "Mapping[RadixNode, None]" = MappingProxyType({})


class RadixNode:
    """Chain of blocks with their keys. `first`: depth number of the first block; later blocks count on from it, and
    splits do not change it. A root is a run without blocks; its `keys` hold the key that its children extend."""

    __slots__ = ("blocks", "children", "first", "keys", "parent")

    def __init__(self, parent: "RadixNode | None", first: int) -> None:
        self.parent = parent
        self.first = first
        self.keys = bytearray()
        self.blocks = array("I")
        self.children: Mapping[RadixNode, None] = _NONE  # in insertion order; most runs have none

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def end(self) -> int:
        """Depth number that the next block would get."""
        return self.first + len(self.blocks)

    def key_at(self, offset: int) -> BlockKey:
        return BlockKey(bytes(self.keys[offset * KEY_BYTES : (offset + 1) * KEY_BYTES]))

    def append(self, key: BlockKey, block: BlockId) -> None:
        self.keys += key
        self.blocks.append(block)

    def pop(self) -> tuple[BlockKey, BlockId]:
        """Removes the last block and returns it with its key."""
        key = BlockKey(bytes(self.keys[-KEY_BYTES:]))
        del self.keys[-KEY_BYTES:]
        return key, self.blocks.pop()

    def common(self, offset: int, packed: bytes, start: int) -> int:
        """Returns how many blocks from `offset` on match the `packed` keys from the `start`-th key on."""
        equal, low = self.keys.startswith, 0
        length = min(len(self.blocks) - offset, len(packed) // KEY_BYTES - start)
        if equal(packed[start * KEY_BYTES : (start + length) * KEY_BYTES], offset * KEY_BYTES):
            return length
        while length - low > 1:  # invariant: `low` keys match, `length` do not
            middle = (low + length) // 2
            part = packed[(start + low) * KEY_BYTES : (start + middle) * KEY_BYTES]
            if equal(part, (offset + low) * KEY_BYTES):
                low = middle
            else:
                length = middle
        return low

    def add_child(self, child: "RadixNode") -> None:
        """Makes `child` an extension of this run's last block."""
        if not isinstance(self.children, dict):
            self.children = {}
        self.children[child] = None
        child.parent = self

    def remove_child(self, child: "RadixNode") -> None:
        assert isinstance(self.children, dict), "a run without children has none to lose"
        del self.children[child]
        if not self.children:
            self.children = _NONE

    def split(self, offset: int) -> "RadixNode":
        """Keeps the blocks before `offset`, at least one, and returns a new only child with the others."""
        rest = RadixNode(self, self.first + offset)
        rest.keys, rest.blocks = self.keys[offset * KEY_BYTES :], self.blocks[offset:]
        for child in self.children:
            child.parent = rest
        rest.children, self.children = self.children, _NONE
        del self.keys[offset * KEY_BYTES :], self.blocks[offset:]
        self.add_child(rest)
        return rest

    def merge_child(self, child: "RadixNode") -> None:
        """Appends the blocks and children of `child`, its only child: the inverse of `split`."""
        self.keys += child.keys
        self.blocks += child.blocks
        self.children = child.children
        for grandchild in self.children:
            grandchild.parent = self
