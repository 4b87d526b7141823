"""Publishes a key index and its data from this process as a node does, to test readers without a node."""

from dataclasses import dataclass, field

from moonserve.kvstore.index_layout import OFFSET_UNIT, Entry
from moonserve.kvstore.published_index import KeyIndex
from moonserve.protocol.kv_blocks import checksum
from moonserve.transfer import Segment, TransferEngine
from tests.kvstore.node.nodes import key


@dataclass(slots=True)
class Published:
    """A key index and a data segment. Objects lie back to back; a removed or moved object leaves its bytes behind."""

    engine: TransferEngine
    data: Segment
    index_segments: list[Segment] = field(default_factory=list)
    index: KeyIndex = field(init=False)
    used: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.index = KeyIndex(self._allocate)

    def _allocate(self, nbytes: int) -> memoryview:
        self.index_segments.append(self.engine.allocate(nbytes, readable=True, name="index"))
        return self.index_segments[-1].buffer

    def put(self, number: int, value: bytes) -> Entry:
        offset = self.used
        self.used += -(-max(1, len(value)) // OFFSET_UNIT) * OFFSET_UNIT
        self.data.buffer[offset : offset + len(value)] = value
        self.generation += 1
        entry = Entry(number, self.generation, checksum([value]), len(value), offset)
        self.index.insert(key(number), entry)
        return entry

    def grow(self) -> None:
        """Inserts objects until the index has moved to a larger segment."""
        before = len(self.index_segments)
        number = 1 << 20
        while len(self.index_segments) == before:
            self.put(number, b"filler")
            number += 1
