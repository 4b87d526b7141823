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
    index: KeyIndex = field(init=False)
    used: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        self.index = KeyIndex(self._allocate)

    def _allocate(self, nbytes: int) -> memoryview:
        return self.engine.allocate(nbytes, readable=True, name="index").buffer

    def put(self, number: int, value: bytes) -> Entry:
        offset = self.used
        self.used += -(-max(1, len(value)) // OFFSET_UNIT) * OFFSET_UNIT
        self.data.buffer[offset : offset + len(value)] = value
        self.generation += 1
        entry = Entry(number, self.generation, checksum([value]), len(value), offset)
        self.index.insert(key(number), entry)
        return entry
